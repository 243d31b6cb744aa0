"""``Memory.prepare_images``: the host memory of images before the first sleep needs it."""

from __future__ import annotations

import pytest
import torch

from torpor._native import Device, Op
from torpor.errors import ConfigurationError, HostMemoryError, StateError, UnknownTagError
from torpor.memory import Memory, MemoryConfig
from torpor.testing.driver import Fault

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


def filled(memory: Memory, tag: str, policy: str = "host") -> torch.Tensor:
    tensor = memory.pool(tag, policy=policy).empty(MIB, torch.uint8)  # type: ignore[arg-type]
    return tensor.copy_(torch.arange(MIB))


def test_the_sleep_after_it_takes_no_more_host_memory(memory: Memory, device: Device) -> None:
    weights, kv = filled(memory, "weights"), filled(memory, "kv_cache", "discard")
    assert memory.prepare_images() == MIB  # what is discarded needs none
    assert memory.stats().tag("weights").image_bytes == memory.stats().host_committed_bytes == MIB
    memory.check_integrity()
    commits = device.fault_calls(Op.COMMIT)
    with Fault(device, Op.COMMIT, count=100):  # there is none to be had
        report = memory.sleep()
    assert device.fault_calls(Op.COMMIT) == commits
    assert report.tags[0].copied_bytes == MIB
    memory.wake()
    assert torch.equal(weights, torch.arange(MIB).to(torch.uint8))
    assert kv.numel()


def test_repeating_it_takes_nothing(memory: Memory) -> None:
    t = filled(memory, "weights")
    assert [memory.prepare_images(), memory.prepare_images()] == [MIB, 0]
    assert memory.release_images("weights") == MIB
    assert memory.prepare_images({"weights": "host"}) == MIB
    memory.sleep()
    assert memory.prepare_images() == 0  # asleep: the images are there
    memory.wake()
    memory.sleep({"weights": "discard"})
    assert memory.stats().host_committed_bytes == 0
    assert t.numel()


def test_a_prepared_image_is_not_believed(memory: Memory) -> None:
    t = filled(memory, "weights").zero_()  # zeros, as the fresh image holds
    memory.prepare_images()
    assert memory.sleep().tags[0].copied_bytes == MIB
    memory.wake()
    assert int(t.sum()) == 0


@pytest.mark.parametrize("nth", [1, 2])
def test_without_host_memory_nothing_is_taken(memory: Memory, device: Device, nth: int) -> None:
    tensors = [filled(memory, "a"), filled(memory, "b")]
    with Fault(device, Op.COMMIT, nth), pytest.raises(HostMemoryError):
        memory.prepare_images()
    assert memory.stats().host_committed_bytes == 0
    memory.check_integrity()
    assert memory.prepare_images() == 2 * MIB
    assert len(tensors) == 2


def test_wrong_arguments_are_a_sleeps(memory: Memory) -> None:
    filled(memory, "kv_cache", "discard")
    with pytest.raises(UnknownTagError):
        memory.prepare_images({"nosuch": "host"})
    with pytest.raises(ConfigurationError, match="policy"):
        memory.prepare_images({"kv_cache": "somewhere"})
    memory.sleep()
    memory.wake()
    with pytest.raises(StateError, match="lost"):
        memory.prepare_images({"kv_cache": "host"})


def test_the_limit_on_host_memory_holds(device: Device) -> None:
    config = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, host_limit_bytes=MIB // 2)
    with Memory(config, device=device) as memory:
        t = filled(memory, "weights")
        with pytest.raises(HostMemoryError, match="host_limit_bytes"):
            memory.prepare_images()
        del t
