"""``Memory.load_in_steps``: memory is taken, tensors are written and chunks are sent at once, and nothing is sent too early."""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from torpor._native import Arena, Device, Op
from torpor.errors import DeviceError, HostMemoryError, StateError
from torpor.memory import Memory, MemoryConfig, backing, images, loading
from torpor.testing.driver import Fault, every_fault

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=CHUNK, copy_threads=2)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "COMMIT_CHUNKS", 2)
    monkeypatch.setattr(loading, "COPY_CHUNKS", 2)
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory


def tensors_in(memory: Memory, sizes: list[int]) -> list[torch.Tensor]:
    pool = memory.pool("weights")
    pool.reserve(sum(-(-size // 256) * 256 for size in sizes))
    return [pool.empty(size, torch.uint8).fill_(255) for size in sizes]


def expected(i: int, size: int) -> torch.Tensor:
    return torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))


def all_right(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(t, expected(i, t.numel())) for i, t in enumerate(tensors))


SIZES = [5 * CHUNK, 100, 3 * CHUNK // 2, CHUNK // 2, 7 * CHUNK, 0, 1, 4 * CHUNK + 13]


def test_tensors_of_many_sizes_written_by_several_threads(memory: Memory) -> None:
    tensors = tensors_in(memory, SIZES)
    with memory.load_in_steps(tensors) as staging, ThreadPoolExecutor(3) as threads:
        assert [(t.shape, t.dtype) for t in staging.tensors] == [(t.shape, t.dtype) for t in tensors]

        def write(i: int, staging: Any = staging) -> None:
            staging.ready(i)
            staging.tensors[i].copy_(expected(i, SIZES[i]))
            staging.written(i)
            staging.written(i)

        list(threads.map(write, reversed(range(len(SIZES)))))
    del staging, write
    assert all_right(tensors)
    memory.check_integrity()
    assert memory.sleep().tags[0].copied_bytes == 0, "M7: the images are made"
    memory.wake()
    assert all_right(tensors)


def test_what_was_not_told_is_written_when_the_block_ends(memory: Memory) -> None:
    tensors = tensors_in(memory, SIZES)
    with memory.load_in_steps(tensors) as staging:
        for i, tensor in enumerate(staging.tensors):
            staging.ready(i)
            tensor.copy_(expected(i, SIZES[i]))
    del staging, tensor
    assert all_right(tensors)
    assert memory.sleep().tags[0].copied_bytes == 0
    memory.wake()
    assert all_right(tensors)


def test_a_chunk_waits_for_all_that_lie_in_it(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tensors = tensors_in(memory, [4 * CHUNK + 100, 4 * CHUNK])
    sent = threading.Event()
    load = images.ImageStore.load

    def note(store: Any, chunks: Any) -> None:
        load(store, chunks)
        sent.set()

    monkeypatch.setattr(images.ImageStore, "load", note)
    with memory.load_in_steps(tensors) as staging:
        staging.ready(0)
        staging.tensors[0].copy_(expected(0, first.numel()))
        staging.written(0)
        assert sent.wait(10), "chunks that are complete go at once"
        assert torch.equal(first[: 4 * CHUNK], expected(0, first.numel())[: 4 * CHUNK])
        assert int(first[-1]) == 255, "the chunk that the other begins in does not"
        staging.ready(1)
        staging.tensors[1].copy_(expected(1, second.numel()))
        staging.written(1)
    del staging
    assert all_right(tensors)


def test_ready_waits_for_all_of_a_tensors_memory(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_in(memory, [CHUNK, 6 * CHUNK])
    gate, begun = threading.Event(), threading.Event()
    commit, calls = Arena.commit, [0]

    def slow(arena: Arena, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            begun.set()
            assert gate.wait(10)
        commit(arena, *arguments)

    monkeypatch.setattr(Arena, "commit", slow)
    with memory.load_in_steps(tensors) as staging, ThreadPoolExecutor(1) as other:
        staging.ready(0)
        staging.tensors[0].copy_(expected(0, CHUNK))
        assert begun.wait(10)
        waiting = other.submit(staging.ready, 1)
        with pytest.raises(futures.TimeoutError):  # before Python 3.11 not the builtin one
            waiting.result(0.3)
        gate.set()
        waiting.result(10)
        staging.tensors[1].copy_(expected(1, 6 * CHUNK))
    del staging, waiting
    assert all_right(tensors)


def test_m12_every_driver_call_may_fail_and_the_load_be_repeated() -> None:
    for fault in every_fault([Op.COMMIT, Op.COPY, Op.HASH]):
        memory = Memory(CONFIG, device=fault.device)
        tensors = tensors_in(memory, SIZES)
        with fault:
            went_well = loads(memory, tensors)
        assert went_well != fault.reached
        memory.check_integrity()
        assert loads(memory, tensors)
        assert all_right(tensors)
        assert memory.sleep().tags[0].copied_bytes == 0
        memory.wake()
        assert all_right(tensors)
        memory.close()
        del tensors


def loads(memory: Memory, tensors: list[torch.Tensor]) -> bool:
    """Loads; False when that ended in an error of the driver."""
    try:
        with memory.load_in_steps(tensors) as staging:
            for i, tensor in enumerate(tensors):
                staging.ready(i)
                staging.tensors[i].copy_(expected(i, tensor.numel()))
                staging.written(i)
    except (DeviceError, HostMemoryError):
        return False
    return True


def test_ready_raises_what_taking_memory_failed_with(memory: Memory, device: Device) -> None:
    tensors = tensors_in(memory, SIZES)
    with Fault(device, Op.COMMIT, 4), pytest.raises(HostMemoryError, match="injected"), memory.load_in_steps(tensors) as staging:
        staging.ready(len(SIZES) - 1)
    memory.check_integrity()
    assert memory.stats().host_committed_bytes == 0


def test_without_room_nothing_begins(device: Device) -> None:
    config = MemoryConfig(extent_bytes=MIB, chunk_bytes=CHUNK, copy_threads=2, host_limit_bytes=CHUNK)
    with Memory(config, device=device) as memory:
        tensors = tensors_in(memory, SIZES)
        with pytest.raises(HostMemoryError, match="host_limit_bytes"), memory.load_in_steps(tensors):
            pytest.fail("began")
        del tensors


def test_nobody_sleeps_meanwhile(memory: Memory) -> None:
    tensors = tensors_in(memory, [CHUNK])
    with memory.load_in_steps(tensors) as staging:
        staging.ready(0)
        staging.tensors[0].fill_(1)
        with pytest.raises(StateError, match="load"):
            memory.sleep()
    del staging
    assert int(tensors[0].min()) == 1
