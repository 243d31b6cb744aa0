"""A tensor that died may still be in use by kernels: what it lay in goes, and is given to others, when the device has settled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torpor._native import Region
from torpor.errors import DeviceError
from torpor.memory import Memory, MemoryConfig

MIB = 1 << 20
TAG = "of_these_tests"  # others' regions may go at any garbage collection


class Work:
    """What the device is still at: kernels that use a tensor begin before it dies, and end when somebody waits."""

    def __init__(self, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = False
        self.capturing = False
        self.torn = 0  # regions that went under kernels
        self._device: Any = memory.device
        destroy = Region.destroy
        monkeypatch.setattr(self._device, "synchronize", self._wait)

        def watched(region: Region) -> None:
            self.torn += self.under_way and region.name == TAG
            destroy(region)

        monkeypatch.setattr(Region, "destroy", watched)

    def _wait(self) -> None:
        if self.capturing:
            raise DeviceError("not while a graph is captured", operation="synchronize", code=900)
        self.under_way = False


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(MemoryConfig(driver="host", extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2))
    yield memory
    memory.close()


@pytest.fixture
def work(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(memory, monkeypatch)


def regions(memory: Memory) -> int:
    return memory.stats().tag(TAG).regions


def test_a_region_goes_when_the_device_has_settled(memory: Memory, work: Work) -> None:
    pool = memory.pool(TAG, policy="discard")
    dying = pool.empty(4 * MIB, torch.uint8)
    work.under_way = True
    del dying
    gc.collect()
    assert regions(memory) == 1
    memory.sleep()
    assert (regions(memory), work.torn, work.under_way) == (0, 0, False)


def test_bytes_are_given_to_the_next_when_the_device_has_settled(memory: Memory, work: Work) -> None:
    pool = memory.pool(TAG, policy="discard")
    kept, dying = pool.empty(1000, torch.uint8), pool.empty(1000, torch.uint8)
    address = dying.data_ptr()
    work.under_way = True
    del dying
    gc.collect()
    following = pool.empty(1000, torch.uint8)
    assert (following.data_ptr(), work.under_way) == (address, False)
    del kept, following


@pytest.mark.parametrize("known", [True, False])
def test_nothing_goes_while_a_graph_is_captured(memory: Memory, work: Work, known: bool) -> None:
    """Of a capture in a pool nobody waits; of another one the driver tells."""
    shared: Any = memory._shared  # type: ignore[attr-defined]
    pool = memory.pool(TAG, policy="discard")
    dying = pool.empty(4 * MIB, torch.uint8)
    address, work.under_way = dying.data_ptr(), True
    shared.captures, work.capturing = int(known), not known
    del dying
    gc.collect()
    following = pool.empty(4 * MIB, torch.uint8)
    assert (regions(memory), following.data_ptr() == address, work.torn) == (2, False, 0)
    shared.captures, work.capturing = 0, False
    del following
    gc.collect()
    memory.sleep()
    assert (regions(memory), work.torn) == (0, 0)


def test_after_the_close_too_and_what_did_not_go_is_tried_again(memory: Memory, work: Work) -> None:
    pool = memory.pool(TAG, policy="discard")
    first, second = pool.empty(4 * MIB, torch.uint8), pool.empty(4 * MIB, torch.uint8)
    memory.close()
    work.under_way = work.capturing = True
    del first
    gc.collect()
    assert (memory.device.closed, memory.device.stats().live_regions, work.torn) == (False, 2, 0)
    work.capturing = False
    del second
    gc.collect()
    assert (memory.device.closed, work.torn) == (True, 0)
