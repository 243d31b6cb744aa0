"""torch's caching allocator in small, over the functions that the real one calls: for pools of the host driver."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from torpor._native.library import library
from torpor.memory import Memory, Pool
from torpor.memory.mempools import MemPools
from torpor.memory.torch_cuda import Guests
from torpor.memory.torch_memory import TorchMemory

STREAM = None


class OutOfMemory(Exception):
    """Where torch raises ``torch.OutOfMemoryError``."""


@dataclass(eq=False)
class FakeMemPool:
    """Keeps what was freed until it is dropped."""

    functions: tuple[Any, Any]
    id: tuple[int, int]
    cached: list[tuple[int, int]] = field(default_factory=list)  # address, bytes
    dropped: bool = False


@dataclass(eq=False)
class FakeTensor:
    """A whole segment."""

    mempool: FakeMemPool
    address: int
    nbytes: int

    def __post_init__(self) -> None:
        self._free = weakref.finalize(self, _free, self.mempool, self.address, self.nbytes)
        self._free.atexit = False

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> FakeTensor:
        return self

    def fill(self, byte: int) -> None:
        ctypes.memset(self.address, byte, self.nbytes)

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)

    def free(self) -> None:
        """Earlier than by its death."""
        self._free()


def _free(mempool: FakeMemPool, address: int, nbytes: int) -> None:
    if mempool.dropped:
        mempool.functions[1](address, nbytes, 0, STREAM)
    else:
        mempool.cached.append((address, nbytes))


class FakeTorch:
    """A ``TorchBackend``."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._stacks = threading.local()
        self.entered: list[FakeMemPool] = []
        self.capture = False
        self.guests = QuietGuests()

    def allocator(self, functions: tuple[str, str]) -> tuple[Any, Any]:
        allocate, free = (getattr(library(), name) for name in functions)
        allocate.argtypes, allocate.restype = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        free.argtypes, free.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p), None
        return allocate, free

    def new_mempool(self, allocator: tuple[Any, Any]) -> FakeMemPool:
        return FakeMemPool(allocator, (0, next(self._ids)))

    def drop(self, mempools: list[FakeMemPool]) -> None:
        for mempool in mempools:
            assert mempool not in self.entered
            mempool.dropped = True
            while mempool.cached:
                mempool.functions[1](*mempool.cached.pop(), 0, STREAM)
        mempools.clear()

    def enter(self, mempool: FakeMemPool) -> FakeMemPool:
        assert mempool not in self.entered, "torch refuses a second entry"
        self.entered.append(mempool)
        self._stack().append(mempool)
        return mempool

    def leave(self, entry: FakeMemPool) -> None:
        self._stack().remove(entry)
        self.entered.remove(entry)

    def capturing(self) -> bool:
        return self.capture

    def is_out_of_memory(self, error: BaseException | None) -> bool:
        return isinstance(error, OutOfMemory)

    def _stack(self) -> list[FakeMemPool]:
        if not hasattr(self._stacks, "mempools"):
            self._stacks.mempools = []
        return self._stacks.mempools  # type: ignore[no-any-return]

    def empty(self, nbytes: int, mempool: FakeMemPool | None = None) -> FakeTensor:
        """In the innermost pool of this thread."""
        mempool = mempool or self._stack()[-1]
        for index, (address, size) in enumerate(mempool.cached):
            if size == nbytes:
                del mempool.cached[index]
                return FakeTensor(mempool, address, nbytes)
        address = mempool.functions[0](nbytes, 0, STREAM)
        if not address:
            raise OutOfMemory(nbytes)
        return FakeTensor(mempool, address, nbytes)


def torch_pool(memory: Memory, torch: FakeTorch, tag: str, **settings: Any) -> Pool:
    """A pool that can be entered."""
    pool = memory.pool(tag, **settings)
    side = TorchMemory(pool, pool._shared, torch)
    side.mempools = MemPools(tag, torch, side.functions, torch.guests)
    pool.attach_torch(side)
    return pool


class QuietGuests(Guests):
    """There is no setting to turn off."""

    def _switch_off(self, mempool: Any) -> None:
        return None
