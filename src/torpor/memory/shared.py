"""What the pools and transactions of one memory share: the device, the images, the hooks, the locks, and what died meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torpor._native import Device
from torpor.errors import DeviceError, StateError
from torpor.memory.backing import Backing
from torpor.memory.config import MemoryConfig
from torpor.memory.hooks import Hooks
from torpor.memory.images import ImageStore
from torpor.memory.procfs import pinned_bytes, usable_cores
from torpor.memory.segment import Deaths

if TYPE_CHECKING:
    from torpor.memory.torch_memory import TorchMemory

MAX_DEFAULT_THREADS = 12
LOCK_POLL_S = 0.02


def default_copy_threads() -> int:
    """All cores this process may use: whoever computes with the memory waits meanwhile. Eight saturate a memory bus;
    checking an image as fast as a PCIe 5 link fills it takes twelve (docs/design/memory.md)."""
    return min(MAX_DEFAULT_THREADS, usable_cores())


class Shared:
    """``lock`` is held for a whole sleep or wake and for every change of structure. ``view`` only while a region is looked at or
    destroyed, so that ``stats()`` on another thread never waits for a sleep whose hook may be waiting for that thread."""

    def __init__(self, config: MemoryConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.threads = config.copy_threads or default_copy_threads()
        self.backing = Backing(device, config.chunk_bytes, config.host_limit_bytes, self.threads)
        self.images = ImageStore(device, self.backing, config.chunk_bytes, self.threads)
        self.hooks = Hooks()
        self.deaths = Deaths()
        self.lock = threading.RLock()
        self.view = threading.Lock()
        self.closed = False
        self.torch: tuple[TorchMemory, ...] = ()  # of pools that torch allocates in; replaced, never changed
        self.explained_pins = 0  # bytes; see Memory.explain_pins
        self.known_pins: dict[tuple[str, object], int] = {}  # by tag and who registered it; see Memory.note_pins
        self.captures = 0  # of graphs, in pools; until they end nobody may wait for the device, which breaks them
        self.copying = False  # beside hooks of a wake: what has died keeps its memory, which the copies may be using
        self._depth = 0  # of structure(), by the thread that has the lock
        self._moving: tuple[int, str] | None = None  # thread, "sleep" or "wake"

    def unexplained_pins(self, leaving: Collection[str] = ()) -> int:
        """Of VmPin, what is not known to be memory of a tag that stays mapped. ``leaving``: tags that do not. DeviceError where
        the kernel does not say."""
        try:
            pinned = pinned_bytes()
        except OSError as error:
            raise DeviceError(f"what is pinned is not known: {error}", operation="pins", code=error.errno or 0) from error
        return pinned - sum(nbytes for (tag, _), nbytes in tuple(self.known_pins.items()) if tag not in leaving)

    @property
    def on_host(self) -> bool:
        return self.device.driver == "host"

    @property
    def maps_beside(self) -> bool:
        """Do copies of a wake go beside the creation of memory?"""
        return not self.on_host

    @property
    def torch_ordinal(self) -> int | None:
        return None if self.on_host else self.config.device

    @contextlib.contextmanager
    def structure(self) -> Iterator[None]:
        """For a call that changes pools. Waits for a sleep or wake of another thread. StateError once closed."""
        with self.lock:
            self.require_open()
            with self.torch_held():
                self.take_back_dead()
                yield

    @contextlib.contextmanager
    def torch_held(self) -> Iterator[None]:
        """What torch frees meanwhile is only noted: no region goes but by us."""
        self._depth += 1
        try:
            if self._depth == 1:
                for torch in self.torch:
                    torch.hold()
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and not self.captures:
                for torch in self.torch:
                    torch.release()

    @contextlib.contextmanager
    def structure_now(self) -> Iterator[None]:
        """As ``structure``, but StateError at once while another thread sleeps or wakes: its hooks may be waiting for us."""
        while not self.lock.acquire(timeout=LOCK_POLL_S):
            moving = self._moving
            if moving is not None and moving[0] != threading.get_ident():
                raise StateError(f"a {moving[1]} is under way; retry after it", state=moving[1])
        try:
            with self.structure():
                yield
        finally:
            self.lock.release()

    @contextlib.contextmanager
    def transaction(self, what: str) -> Iterator[None]:
        """For a sleep or a wake. StateError inside a hook of another one."""
        with self.lock:
            self.require_still(what)
            self._moving = (threading.get_ident(), what)
            try:
                with self.structure():
                    try:
                        yield
                    finally:
                        for torch in self.torch:
                            torch.pool.settle_torch()
            finally:
                self._moving = None

    def require_still(self, what: str) -> None:
        """StateError inside a hook. Under the lock, so that what moves moves on this thread."""
        if self._moving is not None:
            moving = self._moving[1]
            raise StateError(f"{what} was called inside a hook of a {moving}: return from the hook first", state=moving)

    def require_no_load(self, what: str) -> None:
        """StateError inside a load, on whose bytes in the images ``what`` would lie, or which it would take away."""
        if self._moving is not None and self._moving[1] == "load":
            raise StateError(f"{what} was called inside a load: leave its block first", state="load")

    def require_no_copies(self, what: str) -> None:
        """StateError inside a load, and in a hook beside the copies of a wake: they use the images."""
        self.require_no_load(what)
        if self.copying:
            raise StateError(f"{what} was called in a hook beside the copies of a wake: call it after the wake", state="wake")

    def require_open(self) -> None:
        if self.closed:
            raise StateError("this Memory is closed", state="closed")

    def take_back_dead(self) -> None:
        """Frees what tensors that died since the last call lay in, when the device has done what it was asked to: kernels may
        still use it. Under the lock; never inside a transaction's own steps, nor while a graph is captured, which must not wait.
        """
        if self.copying or self.captures:
            return
        if self.deaths:
            try:
                self.device.synchronize()
            except DeviceError:
                return  # somebody captures a graph that no pool knows of, or nothing works any more: later
        while (death := self.deaths.take()) is not None:
            segment, offset = death
            segment.owner.take_back(segment, offset)
        self.bury_torch()

    def bury_torch(self) -> None:
        """Destroys what torch has freed. Under the lock, torch held."""
        for torch in self.torch:
            torch.pool.bury()
