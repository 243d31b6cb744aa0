"""Memory files take descriptors, and so does looking at /proc: whoever is the first that finds none, nothing is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Callable, Iterator

import pytest
import torch

from torpor.errors import TorporError
from torpor.memory import Memory, MemoryConfig
from torpor.testing.driver import nothing_leaks

MIB = 1 << 20
CONFIG = MemoryConfig(driver="host", extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # whatever was free in between
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    while count > 0:
        os.close(taken.pop())
        count -= 1
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def grow(memory: Memory) -> None:
    memory.pool("weights").empty(2 * MIB, torch.uint8)


def wake(memory: Memory) -> None:
    memory.sleep()
    memory.wake()


def sleep(memory: Memory) -> None:
    memory.sleep()


def share(memory: Memory) -> None:
    memory.exports("weights").close()


@pytest.mark.parametrize("call", [grow, wake, sleep, share])
@pytest.mark.parametrize("left", range(8))
def test_m12_a_call_that_finds_no_descriptor_can_be_repeated(
    call: Callable[[Memory], None], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
    with nothing_leaks(), Memory(CONFIG) as memory:
        weights = memory.pool("weights", exportable=True).empty(3 * MIB, torch.uint8).fill_(7)
        with descriptors_left(left), contextlib.suppress(TorporError):
            call(memory)
        gc.collect()
        memory.check_integrity()
        memory.wake()
        call(memory)
        memory.wake()
        assert int(weights.min()) == int(weights.max()) == 7
        memory.check_integrity()
        del weights
