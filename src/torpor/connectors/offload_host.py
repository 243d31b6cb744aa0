"""The first place of ``offload``: a buffer in host memory, in slots of one block of all layers. The one unused for longest goes
first.

    slot:  K of layer 0 | V of layer 0 | K of layer 1 | ...
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torpor.errors import BugError, HostMemoryError


@dataclass(slots=True)
class _Entry:
    slot: int
    users: int = 0  # who reads it: it is not given up meanwhile
    filled: bool = False


class HostShelf:
    """Blocks by name. Thread-safe; nothing blocks but for the moment of a look-up."""

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        """``block_bytes``: of all layers together."""
        self.block_bytes = block_bytes
        self.slots = limit_bytes // block_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._free: list[int] = []  # slots that were used before
        self._fresh = 0  # slots from here on never were
        self._buffer: Any = None
        self._bytes: Any = np.empty(0, dtype=np.uint8)
        self._address = 0
        self.evicted = 0

    @property
    def nbytes(self) -> int:
        return self.slots * self.block_bytes

    def open(self, *, page_locked: bool) -> None:
        """Pages of ordinary memory come with their first use; page-locked ones at once. HostMemoryError."""
        import torch

        try:
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=page_locked)
        except RuntimeError as error:
            raise HostMemoryError(
                f"{self.nbytes} bytes of host memory for KV blocks cannot be had (host_bytes): {error}",
                bytes_needed=self.nbytes,
                setting="host_bytes",
            ) from error
        self._bytes, self._address = self._buffer.numpy(), self._buffer.data_ptr()

    def __contains__(self, name: bytes) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.filled

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return len(self) * self.block_bytes

    def reserve(self, name: bytes) -> bool:
        """A slot to be filled: a free one, or that of the block unused for longest. False when every slot is in use, or the
        name has one already."""
        with self._lock:
            slot = None if name in self._entries else self._take_slot()
            if slot is None:
                return False
            self._entries[name] = _Entry(slot, users=1)
            return True

    def fill(self, name: bytes) -> None:
        """What was reserved holds its block now; its user keeps it until ``give_back``."""
        with self._lock:
            self._entries[name].filled = True

    def borrow(self, name: bytes) -> bool:
        """Keeps a block here until ``give_back``. False when it is not here."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.filled:
                return False
            entry.users += 1
            return True

    def touch(self, names: Sequence[bytes]) -> None:
        """Used just now. The end of a text is given up before its beginning, without which it is worth nothing."""
        with self._lock:
            for name in reversed(names):
                if name in self._entries:
                    self._entries.move_to_end(name)

    def give_back(self, name: bytes) -> None:
        """One user less. A slot that was never filled is free again."""
        with self._lock:
            entry = self._entries[name]
            if entry.users <= 0:
                raise BugError("a KV block in host memory was given back twice")
            entry.users -= 1
            if not entry.users and not entry.filled:
                self._drop(name)

    def address(self, name: bytes) -> int:
        """Of a block that is borrowed or reserved."""
        return self._address + self._entries[name].slot * self.block_bytes

    def content(self, name: bytes) -> memoryview:
        """Of a block that is borrowed or reserved."""
        start = self._entries[name].slot * self.block_bytes
        return memoryview(self._bytes)[start : start + self.block_bytes]

    def clear(self) -> None:
        """Every name is forgotten; a slot in use is free when its user gives it back."""
        with self._lock:
            for name, entry in list(self._entries.items()):
                entry.filled = False
                if not entry.users:
                    self._drop(name)

    def close(self) -> None:
        self.clear()
        self._bytes = np.empty(0, dtype=np.uint8)
        self._buffer = None

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._fresh < self.slots:
            self._fresh += 1
            return self._fresh - 1
        oldest = next((name for name, entry in self._entries.items() if not entry.users), None)
        if oldest is None:
            return None
        self._drop(oldest)
        self.evicted += 1
        return self._free.pop()

    def _drop(self, name: bytes) -> None:
        self._free.append(self._entries.pop(name).slot)
