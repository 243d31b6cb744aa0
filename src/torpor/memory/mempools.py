"""The MemPools of one pool: which threads are inside, which MemPool they are in, and the one that graphs are captured in."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from torpor.errors import StateError
from torpor.memory.torch_cuda import Guests, guests


class TorchBackend(Protocol):
    """What is asked of torch; ``TorchCuda`` is the real one."""

    def allocator(self, functions: tuple[str, str]) -> Any: ...
    def new_mempool(self, allocator: Any) -> Any: ...
    def drop(self, mempools: list[Any]) -> None: ...
    def enter(self, mempool: Any) -> Any: ...
    def leave(self, entry: Any) -> None: ...
    def capturing(self) -> bool: ...
    def is_out_of_memory(self, error: BaseException | None) -> bool: ...


@dataclass
class _Guest:
    """A thread that went into the pool, and then as often again as ``depth`` says without another pool between."""

    mempool: Any
    entry: Any
    depth: int
    refusals: int  # how often torch had been given nothing when it came in


class MemPools:
    """Thread-safe. A MemPool that nobody is in is used again by the next who enters, so that segments are."""

    def __init__(self, tag: str, torch: TorchBackend, functions: tuple[str, str], everybody: Guests = guests) -> None:
        self._tag = tag
        self._torch = torch
        self._allocator = torch.allocator(functions)
        self._everybody = everybody
        self._lock = threading.Lock()
        self._inside: dict[int, list[_Guest]] = {}  # by thread, the innermost last
        self._idle: list[Any] = []
        self._graphs: Any = None
        self._capturing = 0
        self._closed = False

    @property
    def inside(self) -> int:
        """How many threads are inside, and how many captures."""
        return len(self._inside) + self._capturing

    def enter(self, refusals: int) -> None:
        """This thread's allocations come from the pool until it leaves as often as it has entered."""
        mine = self._inside.get(threading.get_ident(), [])  # nobody else touches this thread's
        if mine and self._everybody.innermost() is self:
            mine[-1].depth += 1
            return
        mempool = self._take()
        with contextlib.ExitStack() as undo:
            undo.callback(self._put_back, mempool)
            self._everybody.enter(self, mempool)
            undo.callback(self._everybody.leave, self)
            entry = self._torch.enter(mempool)
            undo.pop_all()
        self._inside[threading.get_ident()] = [*mine, _Guest(mempool, entry, 1, refusals)]

    def leave(self) -> int | None:
        """What ``enter`` was told, when this thread has left a MemPool. StateError when it was not inside."""
        me = threading.get_ident()
        if me not in self._inside:
            raise StateError(f"this thread is not inside pool {self._tag!r}: it leaves where it entered", state="outside")
        guest = self._inside[me][-1]
        guest.depth -= 1
        if guest.depth:
            return None
        self._torch.leave(guest.entry)
        self._everybody.leave(self)
        self._inside[me].pop()
        if not self._inside[me]:
            del self._inside[me]
        self._put_back(guest.mempool)
        refusals = guest.refusals
        del guest  # it refers to the MemPool
        if self._closed:
            self.trim()
        return refusals

    def _take(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._torch.new_mempool(self._allocator)

    def _put_back(self, mempool: Any) -> None:
        with self._lock:
            self._idle.append(mempool)

    def begin_capture(self) -> tuple[int, int]:
        """The id of the MemPool for graphs, one for the pool's whole life: graphs that replay one after another share memory."""
        with self._lock:
            if self._graphs is None:
                self._graphs = self._torch.new_mempool(self._allocator)
        self._everybody.enter(self, self._graphs)
        with self._lock:
            self._capturing += 1
        first, second = self._graphs.id
        return int(first), int(second)

    def end_capture(self) -> None:
        self._everybody.leave(self)
        with self._lock:
            self._capturing -= 1

    def trim(self) -> None:
        """torch gives back segments that no tensor lies in, but those of graphs and of MemPools that somebody is in. Nothing
        happens while this thread captures a graph."""
        if self._torch.capturing():
            return
        with self._lock:
            unused, self._idle = self._idle, []
            if self._closed and self._graphs is not None:
                unused.append(self._graphs)
                self._graphs = None
        self._torch.drop(unused)

    def close(self) -> None:
        """No more entries. Graphs that live keep their memory until they die."""
        self._closed = True
        self.trim()
