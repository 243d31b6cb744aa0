"""M5 where images are copied while memory is created, as on a GPU: the whole transaction, on the host driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from torpor._native import Device, Op
from torpor.errors import DeviceError, DeviceMemoryError
from torpor.memory import Memory, MemoryConfig, Residency
from torpor.memory.shared import Shared
from torpor.testing.driver import Fault, nothing_leaks

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


@pytest.fixture
def device() -> Iterator[Device]:
    with nothing_leaks(), Device.open("host", faults=True) as d:
        yield d
        gc.collect()  # caught exceptions keep the test's tensors


@pytest.fixture
def memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
    monkeypatch.setattr(Shared, "maps_beside", True)
    with Memory(CONFIG, device=device) as m:
        yield m


def asleep(memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    weights = memory.pool("weights").empty(2 * MIB, torch.uint8).fill_(7)
    kv = memory.pool("kv_cache", policy="discard").zeros(3 * MIB, torch.uint8)
    memory.sleep()
    return weights, kv


def all_asleep(memory: Memory) -> bool:
    memory.check_integrity()
    return {t.residency for t in memory.stats().tags} == {Residency.ASLEEP}


def test_everything_is_there_afterwards(memory: Memory) -> None:
    weights, kv = asleep(memory)
    report = memory.wake()
    assert "create_map" not in report.phases_s
    assert [t.mapped_bytes for t in report.tags] == [2 * MIB, 3 * MIB]
    assert int(weights.min()) == int(weights.max()) == 7
    assert int(kv.sum()) == 0
    memory.check_integrity()


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
def test_m5_whichever_creation_fails_all_stay_asleep_and_the_error_speaks_of_all(
    memory: Memory, device: Device, nth: int
) -> None:
    weights, kv = asleep(memory)
    with Fault(device, Op.CREATE, nth), pytest.raises(DeviceMemoryError) as caught:
        memory.wake()
    assert caught.value.fields["bytes_needed"] == 5 * MIB
    assert caught.value.fields["bytes_free"] > 0
    assert all_asleep(memory)
    memory.wake()
    assert int(weights.min()) == 7
    assert kv.numel()


@pytest.mark.parametrize("op", [Op.MAP, Op.SET_ACCESS, Op.COPY, Op.HASH])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_m12_whatever_fails_can_be_retried(memory: Memory, device: Device, op: Op, nth: int) -> None:
    weights, kv = asleep(memory)
    with Fault(device, op, nth) as fault:
        try:
            memory.wake()
        except DeviceError:
            assert all_asleep(memory)
        else:
            assert not fault.reached
    memory.wake()
    assert int(weights.min()) == 7
    assert kv.numel()


def test_where_memory_may_be_short_all_is_asked_for_at_once(
    memory: Memory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, kv = asleep(memory)
    monkeypatch.setattr(device, "free_bytes", lambda: 4 * MIB)
    assert "create_map" in memory.wake().phases_s
    assert int(weights.min()) == 7
    assert kv.numel()
