"""``Memory.load_through_images``: tensors are filled by way of their images, which the first sleep then finds (M7)."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from torpor._native import ChunkImage, Device, Op
from torpor.errors import ConfigurationError, DeviceError, HostMemoryError, StateError
from torpor.memory import Memory, MemoryConfig
from torpor.testing.driver import Fault

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=CHUNK, copy_threads=2)


def values(tensor: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return torch.arange(tensor.numel()).mul_(seed).to(tensor.dtype).reshape(tensor.shape)


def test_the_tensors_have_what_was_written_and_the_first_sleep_copies_nothing(memory: Memory) -> None:
    pool = memory.pool("weights")
    tensors = [pool.empty((300, 1000), torch.float32), pool.empty(7, torch.bfloat16), pool.empty(2 * MIB, torch.uint8)]
    tensors.append(pool.empty((0, 3)))
    with memory.load_through_images(tensors) as staging:
        assert [(s.shape, s.dtype) for s in staging] == [(t.shape, t.dtype) for t in tensors]
        for tensor in staging:
            tensor.copy_(values(tensor))
    del staging, tensor
    assert all(torch.equal(t, values(t)) for t in tensors)
    memory.check_integrity()
    assert memory.sleep().tags[0].copied_bytes == 0
    memory.wake()
    assert all(torch.equal(t, values(t)) for t in tensors)


def test_neighbours_in_the_same_chunk_keep_their_bytes(memory: Memory) -> None:
    pool = memory.pool("weights")
    pool.reserve(MIB)
    before, loaded, after = (pool.empty(10_000, torch.int32) for _ in range(3))
    before.copy_(values(before, 3))
    after.copy_(values(after, 5))
    with memory.load_through_images([loaded]) as [staging]:
        staging.copy_(values(staging))
    del staging
    assert torch.equal(loaded, values(loaded))
    assert torch.equal(before, values(before, 3))
    assert torch.equal(after, values(after, 5))
    memory.check_integrity()
    memory.sleep()
    memory.wake()
    assert torch.equal(after, values(after, 5))


def test_what_is_written_afterwards_is_copied_by_the_sleep(memory: Memory) -> None:
    t = memory.pool("weights").empty(MIB, torch.uint8)
    with memory.load_through_images([t]) as [staging]:
        staging.fill_(3)
    del staging
    t[5] = 4
    assert memory.sleep().tags[0].copied_bytes == CHUNK
    memory.wake()
    assert (int(t[5]), int(t[6])) == (4, 3)


def test_a_block_that_raises_leaves_the_tensors_as_they_were(memory: Memory) -> None:
    t = memory.pool("weights").zeros(MIB, torch.uint8)
    with contextlib.suppress(ZeroDivisionError), memory.load_through_images([t]) as [staging]:
        staging.fill_(3)
        raise ZeroDivisionError
    del staging
    assert int(t.sum()) == 0
    assert memory.sleep().tags[0].copied_bytes == MIB, "the image, half written, is not believed"
    memory.wake()
    assert int(t.sum()) == 0


def test_bytes_that_do_not_arrive_are_an_error(memory: Memory, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    t = memory.pool("weights").zeros(MIB, torch.uint8)
    restore = device.restore_chunks

    def corrupt(images: list[ChunkImage], chunk_bytes: int, **arguments: Any) -> None:
        restore(images, chunk_bytes, **arguments)
        for image in images:
            ctypes.memset(image.device_address + 100, 0xEE, 1)
            image.checked[:] = device.hash_chunks(image.device_address, image.nbytes, chunk_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(device, "restore_chunks", corrupt)
        with pytest.raises(DeviceError, match="not what was loaded"), memory.load_through_images([t]) as [staging]:
            staging.fill_(3)
    with memory.load_through_images([t]) as [staging]:
        staging.fill_(3)
    del staging
    assert int(t.min()) == int(t.max()) == 3


@pytest.mark.parametrize("op", [Op.COMMIT, Op.COPY, Op.HASH])
def test_m12_a_failing_driver_call_can_be_retried(memory: Memory, device: Device, op: Op) -> None:
    t = memory.pool("weights").zeros(MIB, torch.uint8)
    with Fault(device, op), pytest.raises((DeviceError, HostMemoryError)), memory.load_through_images([t]) as [staging]:
        staging.fill_(3)
    memory.check_integrity()
    with memory.load_through_images([t]) as [staging]:
        staging.fill_(3)
    del staging
    assert int(t.min()) == 3
    memory.sleep()
    memory.wake()
    assert int(t.min()) == 3


def test_what_cannot_be_loaded_is_refused(memory: Memory) -> None:
    t = memory.pool("weights").empty((100, 100))
    for wrong, message in ((torch.empty(3), "no pool"), (t.T[1:], "contiguous")):
        with pytest.raises(ConfigurationError, match=message), memory.load_through_images([wrong]):
            pass
    with memory.load_through_images([t]) as [staging]:
        staging.fill_(1.0)
        with pytest.raises(StateError, match="load"):
            memory.sleep()
    del staging
    memory.sleep()
    with pytest.raises(StateError, match="wake"), memory.load_through_images([t]):
        pass
    memory.wake()
    assert float(t.min()) == 1.0
