"""One engine's memory with weights made of a seed, commanded over a pipe; it can kill or stop itself at a point of sharing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from torpor.memory import Memory, MemoryConfig, image_files, sharing

SIZE = 64 << 20
CHUNK = 64 << 10
POINTS = {  # of the making of an image, in order
    "turn": (sharing.Turn, "take"),
    "find": (sharing, "find_files"),
    "file": (sharing, "make_file"),
    "write": (sharing, "write_at"),
    "seal": (image_files.fcntl, "fcntl"),
    "sealed": (sharing, "seal_file"),
    "adopt": (sharing.Sharing, "_adopt"),
}


class Engine:
    def __init__(self, salt: int) -> None:
        self._salt = salt
        self.memory = Memory(MemoryConfig(driver="host", chunk_bytes=CHUNK, copy_threads=2, share_images=True))
        self.weights = self.memory.pool("weights").empty(SIZE, torch.uint8)
        self.fill(1)

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.weights.copy_(self._expected())

    def _expected(self) -> torch.Tensor:
        return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(self._salt + self.seed))

    def right(self) -> bool:
        return torch.equal(self.weights, self._expected())

    def share(self) -> dict[str, Any]:
        report = self.memory.share_images("weights")
        return {"found": report.found_bytes, "made": report.made_bytes, "private": report.private_bytes}

    def sleep(self) -> int:
        copied = self.memory.sleep().tags[0].copied_bytes
        self.memory.check_integrity()
        return copied

    def wake(self) -> None:
        self.memory.wake()

    def signal_at(self, point: str, nth: int, number: int) -> None:
        """At the nth call of it from now on, before it does anything."""
        holder, name = POINTS[point]
        real: Callable[..., Any] = getattr(holder, name)
        calls = [0]

        def hit(*arguments: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == nth:
                os.kill(os.getpid(), signal.Signals(number))
            return real(*arguments, **more)

        setattr(holder, name, hit)


def main(commands: Connection, salt: int) -> None:
    """Until the other end closes."""
    torch.set_num_threads(1)
    engine = Engine(salt)
    while True:
        try:
            name, *arguments = commands.recv()
        except EOFError:
            return
        commands.send(getattr(engine, name)(*arguments))
