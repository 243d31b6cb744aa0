"""torch's allocator, as far as pools need it: MemPools over our functions, what routes a thread's allocations to one, and the
setting that would go round it. Everything torch keeps private is named here and nowhere else.

Facts, read in torch's source and run on 2.11, where ``tests/gpu`` checks them:

- A MemPool's memory comes in segments of 2 MiB, 20 MiB, or what a larger tensor needs, from our functions. torch keeps a segment
  with nothing in it for as long as the MemPool object lives; ``empty_cache`` does not touch it. Once the object is gone, empty
  segments go at once, the others at the first ``empty_cache`` after their last tensor.
- A MemPool can be entered once at a time in the whole process. Of those a thread has entered, the last gets its allocations.
- With ``expandable_segments`` torch takes memory for a MemPool from its own expandable segments, and never calls our functions.
- A MemPool's destructor ends the process when it runs while a graph is captured or a MemPool is entered, on any thread, unless
  somebody else uses the MemPool's memory too. ``empty_cache`` inside a MemPool touches no cache but that of MemPools nobody uses.
"""

from __future__ import annotations

import re
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor._native import find_library, keep_forever, let_go
from torpor.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

_sweeping = threading.Lock()
_shelters: dict[int, torch.cuda.MemPool] = {}

EXPANDABLE = re.compile(r"\s*expandable_segments\s*:\s*\w+\s*,?")


class TorchCuda:
    """One device of torch."""

    def __init__(self, ordinal: int) -> None:
        """ConfigurationError where torch cannot give pools their memory."""
        import torch

        if not torch.cuda.is_available():
            message = f"this torch ({torch.__version__}) has no CUDA: `with pool:` has nothing to route. Use pool.empty"
            raise ConfigurationError(message, setting="torch", value=torch.__version__)
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            message = f"torch's allocator backend is {backend!r}: pools need 'native' (PYTORCH_CUDA_ALLOC_CONF=backend:native)"
            raise ConfigurationError(message, setting="PYTORCH_CUDA_ALLOC_CONF", value=backend)
        self.ordinal = ordinal

    def allocator(self, functions: tuple[str, str]) -> Any:
        """Never freed: memory that torch still has is given back through it, also while the interpreter exits."""
        import torch

        pluggable: Any = torch.cuda.memory.CUDAPluggableAllocator(str(find_library()), *functions)
        allocator = pluggable.allocator()
        keep_forever(allocator)
        return allocator

    def new_mempool(self, allocator: Any) -> torch.cuda.MemPool:
        """It lives until ``drop``, also when nobody refers to it: the interpreter must not destroy it at a moment of its own."""
        import torch

        with torch.cuda.device(self.ordinal):
            mempool = torch.cuda.MemPool(allocator)
        keep_forever(mempool)
        return mempool

    def drop(self, mempools: list[torch.cuda.MemPool]) -> None:
        """The references in the list, which is emptied, must be the last. Segments without tensors are freed at once, and so are
        those that have lost their last tensor since their MemPool was dropped."""
        import torch

        dropped = [mempool.id for mempool in mempools]
        for mempool_id in dropped:  # used once more, so that the destructor has nothing to do
            torch._C._cuda_beginAllocateCurrentThreadToPool(self.ordinal, mempool_id)
            torch._C._cuda_endAllocateToPool(self.ordinal, mempool_id)
        while mempools:
            let_go(mempools.pop())
        for mempool_id in dropped:
            torch._C._cuda_releasePool(self.ordinal, mempool_id)
        with _sweeping, torch.cuda.use_mem_pool(self._shelter(), self.ordinal):
            torch.cuda.empty_cache()

    def _shelter(self) -> torch.cuda.MemPool:
        """A MemPool in which nothing is ever allocated."""
        if self.ordinal not in _shelters:
            _shelters[self.ordinal] = self.new_mempool(None)
        return _shelters[self.ordinal]

    def enter(self, mempool: torch.cuda.MemPool) -> AbstractContextManager[None]:
        """From here on this thread's allocations come from ``mempool``. An entry that is never left is not left by the exit of
        the interpreter either, when half of torch is gone."""
        import torch

        entry = torch.cuda.use_mem_pool(mempool, self.ordinal)
        entry.__enter__()
        keep_forever(entry)
        return entry

    def leave(self, entry: AbstractContextManager[None]) -> None:
        entry.__exit__(None, None, None)
        let_go(entry)

    def capturing(self) -> bool:
        import torch

        return torch.cuda.is_current_stream_capturing()

    def is_out_of_memory(self, error: BaseException | None) -> bool:
        import torch

        return isinstance(error, torch.OutOfMemoryError)


@dataclass(frozen=True)
class _Settings:
    """torch's settings as they were, and as we left them; any MemPool that can be asked."""

    mempool: torch.cuda.MemPool
    before: str
    ours: str


class Guests:
    """Who is inside a pool, in the whole process: torch's settings and MemPools know no smaller unit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._off: _Settings | None = None
        self._of_thread = threading.local()

    @property
    def nobody(self) -> bool:
        return self._count == 0

    def innermost(self) -> object:
        """What this thread has entered last and not left; None outside."""
        entered = self._entered()
        return entered[-1] if entered else None

    def _entered(self) -> list[object]:
        entered: list[object] = self._of_thread.__dict__.setdefault("entered", [])
        return entered

    def enter(self, what: object, mempool: torch.cuda.MemPool) -> None:
        with self._lock:
            if self._count == 0:
                self._off = self._switch_off(mempool)
            self._count += 1
        self._entered().append(what)

    def leave(self, what: object) -> None:
        entered = self._entered()
        del entered[len(entered) - 1 - entered[::-1].index(what)]
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._off is not None:
                off, self._off = self._off, None
                if _settings(off.mempool)[0] == off.ours:  # else somebody has set something since: theirs stands
                    _set(off.before)

    def _switch_off(self, mempool: torch.cuda.MemPool) -> _Settings | None:
        return _turn_expandable_off(mempool)


guests = Guests()


def _turn_expandable_off(mempool: torch.cuda.MemPool) -> _Settings | None:
    """torch resets other options that a new setting does not name, so all of them are said again. None: it was off."""
    text, on = _settings(mempool)
    if not on:
        return None
    others = EXPANDABLE.sub("", text).strip(" ,")
    before = text if EXPANDABLE.search(text) else _joined(others, "expandable_segments:True")
    ours = _joined(others, "expandable_segments:False")
    _set(ours)
    return _Settings(mempool, before, ours)


def _joined(*options: str) -> str:
    return ",".join(option for option in options if option)


def _settings(mempool: torch.cuda.MemPool) -> tuple[str, bool]:
    """The text that was set last, and whether expandable segments are on, which the text need not name."""
    found = _snapshot(mempool)["allocator_settings"]
    text = found.get("PYTORCH_CUDA_ALLOC_CONF") or found.get("PYTORCH_ALLOC_CONF") or ""
    return str(text), bool(found["expandable_segments"])


def _snapshot(mempool: torch.cuda.MemPool) -> Any:
    """Of one MemPool: a snapshot lists every tensor, and all of them take a millisecond."""
    import torch

    snapshot: Any = torch._C._cuda_memorySnapshot
    try:
        return snapshot((*mempool.id, False))
    except Exception:  # a torch without the flag that leaves traces out
        return snapshot(mempool.id)


def _set(text: str) -> None:
    import torch

    put: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    put(text)
