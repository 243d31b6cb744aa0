"""Engines with weights in one process, which share images of small pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from torpor._native import Device
from torpor.memory import Memory, MemoryConfig, sharing
from torpor.memory.procfs import open_memfds
from torpor.testing.driver import nothing_leaks

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
PIECE = 4 * CHUNK
SIZE = 10 * PIECE + 3 * CHUNK + 24
SALT = os.getpid() << 16  # other runs of these tests on the same machine must not share with this one
CONFIG = MemoryConfig(driver="host", extent_bytes=MIB, chunk_bytes=CHUNK, copy_threads=2)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "PIECE_CHUNKS", PIECE // CHUNK)
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory


class Engine:
    """A memory with weights, made of a seed."""

    def __init__(self, seed: int, device: Device | None = None, **settings: Any) -> None:
        self.memory = Memory(MemoryConfig(**{**vars(CONFIG), **settings}), device=device)
        self.weights = self.memory.pool("weights").empty(SIZE, torch.uint8)
        self.seed = seed
        self.fill()

    def fill(self) -> None:
        self.weights.copy_(self.expected())

    def expected(self) -> torch.Tensor:
        return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(SALT + self.seed))

    @property
    def right(self) -> bool:
        return torch.equal(self.weights, self.expected())

    @property
    def shared(self) -> int:
        return self.memory.stats().tag("weights").shared_image_bytes

    @property
    def image(self) -> int:
        return self.memory.stats().tag("weights").image_bytes

    def cycle(self) -> int:
        """Asleep and awake; the bytes that were copied."""
        copied = self.memory.sleep().tags[0].copied_bytes
        self.memory.check_integrity()
        self.memory.wake()
        return copied


@pytest.fixture
def engine() -> Iterator[Any]:
    """Makes engines; nothing of them is left in the end."""
    with nothing_leaks(), ExitStack() as undo:

        def make(seed: int = 1, **settings: Any) -> Engine:
            made = Engine(seed, **settings)
            undo.callback(made.memory.close)
            return made

        yield make
    assert files_open() == 0


def files_open() -> int:
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:torpor-image-") for fd, _ in open_memfds(os.getpid()))
