"""``host_limit_bytes`` holds for images and for what is taken ahead of them together."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from torpor._native import Arena, Device
from torpor.memory import Memory, MemoryConfig, backing

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
LIMIT = 8 * MIB
CONFIG = MemoryConfig(extent_bytes=16 * MIB, chunk_bytes=CHUNK, copy_threads=2, host_limit_bytes=LIMIT)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "COMMIT_CHUNKS", 4)


@pytest.fixture
def most(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was committed and spare after each commit."""
    commit, seen = Arena.commit, list[int]()

    def noted(arena: Arena, *arguments: Any) -> None:
        commit(arena, *arguments)
        stats = memory.device.stats()
        seen.append(stats.committed_bytes + stats.spare_bytes)

    monkeypatch.setattr(Arena, "commit", noted)
    return seen


def second_half(memory: Memory) -> torch.Tensor:
    """Its image lies where nothing is taken ahead: the first half of the region is nobody's."""
    pool = memory.pool("weights")
    pool.reserve(2 * LIMIT)
    first = pool.empty(LIMIT, torch.uint8)
    second = pool.empty(LIMIT, torch.uint8).fill_(3)
    del first
    return second


def ahead_has_ended(memory: Memory) -> None:
    arena = memory._shared.backing._arena
    assert arena is not None
    while arena.ahead().active:
        time.sleep(0)


def cycles(memory: Memory, tensor: torch.Tensor) -> None:
    memory.check_integrity()
    memory.sleep()
    memory.wake()
    assert tensor.eq(3).all()


def test_images_that_lie_elsewhere_end_what_was_taken_ahead(memory: Memory, most: list[int]) -> None:
    tensor = second_half(memory)
    memory.take_ahead(LIMIT)
    ahead_has_ended(memory)
    memory.prepare_images()
    assert max(most) <= LIMIT
    stats = memory.stats()
    assert (stats.host_committed_bytes, stats.host_spare_bytes) == (LIMIT, 0)
    cycles(memory, tensor)


def test_what_is_still_to_come_counts_as_what_is_there(memory: Memory, most: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = second_half(memory)
    stats, ahead = Device.stats, Arena.ahead
    asked = LIMIT // 2

    def none_yet(arena: Arena) -> Any:
        return dataclasses.replace(ahead(arena), taken_bytes=0, active=True)

    memory.take_ahead(asked)
    with monkeypatch.context() as patch:  # as if nothing were taken yet, whatever the threads do
        patch.setattr(Device, "stats", lambda device: dataclasses.replace(stats(device), spare_bytes=0))
        patch.setattr(Arena, "ahead", none_yet)
        memory.prepare_images()
    ahead_has_ended(memory)
    assert memory.stats().host_committed_bytes + memory.stats().host_spare_bytes <= LIMIT
    cycles(memory, tensor)


def test_images_that_lie_where_it_was_taken_use_it(memory: Memory, most: list[int]) -> None:
    tensor = memory.pool("weights").empty(LIMIT, torch.uint8).fill_(3)
    memory.take_ahead(LIMIT)
    memory.prepare_images()
    assert max(most) <= LIMIT
    report = memory.end_ahead()
    assert report.unused_bytes == 0
    cycles(memory, tensor)
