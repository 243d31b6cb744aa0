"""Shared images and loading in steps on a GPU: page-locked, read-only, right after every wake."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from torpor._native import Op
from torpor.errors import DeviceError, HostMemoryError
from torpor.memory import Memory, Staging, sharing
from torpor.testing.driver import Fault

pytestmark = pytest.mark.gpu

MIB = 1 << 20
CHUNK, PIECE = 2 * MIB, 8 * MIB
SIZE = 100 * MIB + 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "PIECE_CHUNKS", PIECE // CHUNK)


def bytes_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def weights_in(memory: Memory, seed: int) -> torch.Tensor:
    weights = memory.pool("weights").empty(SIZE, torch.uint8).copy_(bytes_of(seed))
    torch.cuda.synchronize()
    return weights


@pytest.fixture
def two(open_cuda_memory: Any) -> Iterator[list[tuple[Memory, torch.Tensor]]]:
    memories = [open_cuda_memory(chunk_bytes=CHUNK, extent_bytes=32 * MIB, faults=True) for _ in range(2)]
    pairs = [(memory, weights_in(memory, 1)) for memory in memories]
    yield pairs
    pairs.clear()


def cycle(memory: Memory) -> int:
    copied = memory.sleep().tags[0].copied_bytes
    memory.check_integrity()
    memory.wake()
    return copied


def shared_bytes(memory: Memory) -> int:
    return memory.stats().tag("weights").shared_image_bytes


def test_m4_m7_one_image_for_two_and_private_where_one_changes(two: list[tuple[Memory, torch.Tensor]]) -> None:
    (first, a), (second, b) = two
    made, found = first.share_images("weights"), second.share_images("weights")
    assert (made.private_bytes, made.problems) == (0, ())
    assert (found.made_bytes, found.private_bytes, found.problems) == (0, 0, ())
    assert found.found_bytes == shared_bytes(first) == shared_bytes(second) >= SIZE
    expected = bytes_of(1).cuda()
    for memory, weights in two:
        assert cycle(memory) == 0
        assert torch.equal(weights, expected)
    b[3 * PIECE + 5] ^= 0xFF
    assert cycle(second) == PIECE
    assert shared_bytes(second) == shared_bytes(first) - PIECE
    assert int(b[3 * PIECE + 5]) == int(expected[3 * PIECE + 5]) ^ 0xFF
    assert cycle(first) == 0
    assert torch.equal(a, expected)
    b.copy_(bytes_of(2))
    cycle(second)
    assert shared_bytes(second) == 0
    assert torch.equal(b.cpu(), bytes_of(2))
    assert cycle(first) == 0
    assert torch.equal(a, expected)


@pytest.mark.parametrize("op", [Op.COMMIT, Op.COPY, Op.HASH])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_m12_what_cannot_be_shared_stays_private(two: list[tuple[Memory, torch.Tensor]], op: Op, nth: int) -> None:
    (first, a), (second, _) = two
    second.share_images("weights")
    with Fault(first.device, op, nth) as fault:
        report = first.share_images("weights")
    assert bool(report.problems) == fault.reached
    assert cycle(first) <= report.private_bytes
    assert torch.equal(a.cpu(), bytes_of(1))
    assert first.share_images("weights").private_bytes == 0
    assert cycle(first) == 0
    assert torch.equal(a.cpu(), bytes_of(1))


def test_loading_in_steps_on_several_threads(open_cuda_memory: Any) -> None:
    memory = open_cuda_memory(chunk_bytes=CHUNK, extent_bytes=32 * MIB)
    pool = memory.pool("weights")
    pool.reserve(SIZE)
    source = bytes_of(4)
    parts = torch.split(source, 3 * MIB + 512)
    tensors = [pool.empty(part.numel(), torch.uint8) for part in parts]

    def write(staging: Staging, i: int) -> None:
        staging.ready(i)
        staging.tensors[i].copy_(parts[i])
        staging.written(i)

    with memory.load_in_steps(tensors) as steps, ThreadPoolExecutor(4) as threads:
        list(threads.map(functools.partial(write, steps), range(len(parts))))
    del steps
    assert all(torch.equal(t.cpu(), part) for t, part in zip(tensors, parts, strict=True))
    assert cycle(memory) == 0
    assert all(torch.equal(t.cpu(), part) for t, part in zip(tensors, parts, strict=True))


@pytest.mark.parametrize("op", [Op.COMMIT, Op.COPY, Op.HASH])
def test_m12_loading_that_fails_can_be_repeated(open_cuda_memory: Any, op: Op) -> None:
    memory = open_cuda_memory(chunk_bytes=CHUNK, extent_bytes=32 * MIB, faults=True)
    weights = weights_in(memory, 1)
    with Fault(memory.device, op), pytest.raises((DeviceError, HostMemoryError)), memory.load_in_steps([weights]) as staging:
        _write(staging, 3)
    memory.check_integrity()
    with memory.load_in_steps([weights]) as staging:
        staging.ready(0)
        staging.tensors[0].copy_(bytes_of(5))
    del staging
    assert cycle(memory) == 0
    assert torch.equal(weights.cpu(), bytes_of(5))
    assert not [fd for fd in os.listdir("/proc/self/fd") if "torpor-image" in _link(fd)]


def _write(staging: Staging, value: int) -> None:
    staging.ready(0)
    staging.tensors[0].fill_(value)


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
