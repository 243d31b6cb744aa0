"""Pools: the regions of one tag, and tensors in them."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from torpor.errors import ConfigurationError, DeviceError, StateError
from torpor.memory import tensors
from torpor.memory.layout import round_up
from torpor.memory.segment import ALIGN_BYTES, Segment
from torpor.memory.settings import PoolSettings
from torpor.memory.shared import Shared
from torpor.memory.torch_memory import TorchMemory
from torpor.memory.types import Content, Residency, TagStats

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FIRST_SHARED_BYTES = 2 << 20  # regions for small tensors double from here up to extent_bytes
OWN_REGION_FRACTION = 8  # a tensor of extent_bytes / 8 that fits nowhere gets a region of its own, which goes when it dies


class Pool:
    """Made by ``Memory.pool``. All methods may be called from any thread; allocating waits for a sleep or wake under way."""

    def __init__(self, tag: str, settings: PoolSettings, shared: Shared) -> None:
        self.tag = tag
        self.settings = settings
        self.segments: tuple[Segment, ...] = ()  # replaced, never changed: readers take no lock
        self.lost = False
        self.slept = False  # only says something while there is no region to say it
        self.mapping = 1  # goes up when a wake maps the pool anew
        self._shared = shared
        self._torch: TorchMemory | None = None  # made when it is needed first

    def __repr__(self) -> str:
        return f"<Pool {self.tag!r}: {len(self.segments)} regions>"

    # ---- for everybody -----------------------------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        return self.state[0]

    @property
    def content(self) -> Content:
        return self.state[1]

    @property
    def state(self) -> tuple[Residency, Content]:
        """Both at one look, which asks the native core about every region."""
        with self._shared.view:
            # Torch frees at any time: a region that is seen without memory for that reason is known to be dying afterwards.
            seen = {s: s.mapped for s in self.segments}
            self._look()
            living = [s for s in self.segments if not s.dying]
            mapped = [seen.get(s, True) for s in living]
            stale = any(s.stale for s in living)
        if not mapped:
            residency = Residency.ASLEEP if self.slept else Residency.RESIDENT
        elif all(mapped):
            residency = Residency.RESIDENT
        else:
            residency = Residency.PARTIAL if any(mapped) else Residency.ASLEEP
        if self.lost:
            return residency, Content.LOST
        return residency, Content.VALID if residency is Residency.RESIDENT and not stale else Content.ON_HOST

    def empty(self, shape: tensors.Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised contiguous tensor in this pool, 256-byte aligned. Its address never changes (M1); the memory is taken
        back by the first call into the memory layer after its storage has died, which waits for the device. One without elements
        lies in no pool.

        StateError while the pool is not resident (M10); DeviceMemoryError.
        """
        sizes = tensors.checked_shape(shape)
        nbytes, kind = tensors.bytes_of(sizes, dtype)
        if nbytes == 0:
            return tensors.empty_nowhere(sizes, kind, self._shared.torch_ordinal)
        with self._shared.structure():
            self._shared.require_no_load("empty")
            self._require_growable()
            segment, offset = self._place(nbytes)
            died = functools.partial(self._shared.deaths.tell, segment, offset)
            return tensors.tensor_at(segment.address + offset, nbytes, sizes, kind, self._shared.torch_ordinal, died)

    def zeros(self, shape: tensors.Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``empty``, filled with zeros."""
        return self.empty(shape, dtype).zero_()

    def reserve(self, nbytes: int) -> None:
        """One region of ``nbytes`` for tensors to come: one large region sleeps and wakes faster than many small ones."""
        if nbytes <= 0:
            raise ConfigurationError(f"cannot reserve {nbytes} bytes: must be more than 0", setting="nbytes", value=nbytes)
        with self._shared.structure():
            self._shared.require_no_load("reserve")
            self._require_growable()
            self._grow(nbytes, shared=True)

    def __enter__(self) -> Pool:
        """Everything that this thread allocates on the device through torch belongs to the pool, until the matching exit.

        It may be entered again inside, other pools too (the innermost counts), and by several threads at once. Threads that are
        started inside, as those of a backward pass, allocate elsewhere. While anybody is inside, the tag cannot be put to sleep.
        torch keeps segments that fell empty for the next who enters; ``trim`` and a sleep give them back.

        Waits for a sleep or wake under way. StateError while the pool is not resident (M10). ConfigurationError on the host
        driver and where torch has no CUDA: use ``empty``.
        """
        with self._shared.structure():
            self._shared.require_no_load("with pool")
            self._require_growable()
            torch = self._torch_memory()
            torch.mempools.enter(torch.refusals())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """StateError in place of torch's OutOfMemoryError when torch got nothing because the pool had gone to sleep."""
        torch = self._torch_memory()
        refusals = torch.mempools.leave()
        reason = None if refusals is None else torch.reason_since(refusals, error)
        if reason is not None:
            log.warning("torch was given no memory in pool %r: %s", self.tag, reason)
            if isinstance(reason, StateError):
                raise reason from error

    @contextlib.contextmanager
    def graph_memory(self) -> Iterator[tuple[int, int]]:
        """For a capture: ``with pool.graph_memory() as id, torch.cuda.graph(graph, pool=id): ...``.

        What the graph allocates belongs to this pool and keeps its addresses, so the graph replays after a sleep and a wake. All
        graphs of a pool share memory: their replays must come one after another. Some kernels keep counters or tables there that
        were filled once, at the capture: such a pool needs the policy "host". "discard" is for graphs that write all they read.
        Errors are those of entering.
        """
        with self._shared.structure():
            self._shared.require_no_load("graph_memory")
            self._require_growable()
            torch = self._torch_memory()
            pool_id = torch.mempools.begin_capture()
            self._shared.captures += 1
        try:
            yield pool_id
        finally:
            torch.mempools.end_capture()
            with self._shared.lock, self._shared.torch_held():
                self._shared.captures -= 1
                self._shared.take_back_dead()  # what waited for the capture to end

    def trim(self) -> None:
        """torch gives back segments of this pool that no tensor lies in, but those of graphs and those that a thread inside may
        use. It does nothing while this thread captures a graph."""
        with self._shared.structure():
            if self._torch is not None:
                self._torch.mempools.trim()
                self.bury()

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensors.storage_address(tensor)
        with self._shared.view:
            self._look()
        return any(s.covers(address) for s in self.segments)

    def stats(self) -> TagStats:
        """A snapshot. Never waits for a sleep or wake under way."""
        with self._shared.view:
            self._look()
            segments = self.segments
            resident = sum(s.nbytes for s in segments if s.mapped)
        residency, content = self.state
        return TagStats(
            tag=self.tag,
            residency=residency,
            content=content,
            regions=len(segments),
            reserved_bytes=sum(s.nbytes for s in segments),
            resident_bytes=resident,
            allocated_bytes=sum(s.layout.used_bytes for s in segments),
            image_bytes=sum(s.image_bytes for s in segments),
            shared_image_bytes=sum(s.shared_image_bytes for s in segments),
            exported=any(s.exported for s in segments),
            hooks=self._shared.hooks.count(self.tag),
            hooks_away=self._shared.hooks.away(self.tag),
        )

    # ---- for the memory layer, under its lock ------------------------------------------------------------------------------

    def mapped_segments(self) -> list[Segment]:
        with self._shared.view:
            self._look()
            return [s for s in self.segments if s.mapped]

    def unmapped_segments(self) -> list[Segment]:
        with self._shared.view:
            return [s for s in self.segments if not s.mapped and not s.dying]

    def take_back(self, segment: Segment, offset: int) -> None:
        """A tensor died. An empty region goes with it; a resident pool keeps one shared region for the next small tensor."""
        segment.layout.free(offset)
        if segment.layout.empty:
            segment.dying = not (segment.shared and segment.mapped and self._is_only_spare(segment))
        elif not segment.mapped:
            with contextlib.suppress(DeviceError):  # the next sleep trims again
                self._shared.images.trim(segment)
        self.bury()

    def bury(self) -> None:
        """Destroys regions that died. One that the driver will not let go stays in the pool, counted in its bytes but not in its
        state, until a later call. So does what copies beside hooks of a wake may be using."""
        if self._shared.copying:
            return
        with self._shared.view:
            self._look()
        for segment in [s for s in self.segments if s.dying and not (s.by_torch and self._shared.captures)]:
            with contextlib.suppress(DeviceError):
                self.destroy(segment)

    def destroy(self, segment: Segment) -> None:
        """DeviceError: it is still there, and the call can be retried."""
        self._shared.images.release(segment)
        if segment.by_torch and segment.mapped:
            self._shared.device.synchronize()  # torch frees what kernels may still use
        with self._shared.view:
            try:
                segment.region.destroy()
            finally:
                if segment.region.closed:  # an interrupt may come with its end
                    self.segments = tuple(s for s in self.segments if s is not segment)

    # ---- memory of torch, under the memory's lock ---------------------------------------------------------------------------

    def require_nobody_inside(self) -> None:
        """StateError while a thread is inside: what torch then gives it out of its cache would lie in sleeping memory."""
        if self._torch is not None and self._torch.mempools.inside:
            message = f"{self._torch.mempools.inside} threads are inside pool {self.tag!r}, which cannot sleep: leave it first"
            raise StateError(message, state=self.residency.value, tag=self.tag)

    def shut_torch(self) -> None:
        """torch gives back what nobody uses, and gets nothing until ``settle_torch``."""
        if self._torch is not None:
            self._torch.mempools.trim()
            self._torch.admit(False)
            self.bury()

    def settle_torch(self) -> None:
        """torch may allocate exactly when everybody else may."""
        if self._torch is not None and not self._torch.closed:
            self._torch.admit(self._growable())

    def close_torch(self) -> None:
        """What tensors still lie in is left to them."""
        if self._torch is None:
            return
        self._torch.leave_to_torch()
        with self._shared.view:
            left = set(self._torch.disown())
            self.segments = tuple(s for s in self.segments if s not in left)

    def _torch_memory(self) -> TorchMemory:
        if self._torch is None:
            if self._shared.on_host:
                message = "torch allocates host memory in a way that cannot be routed: `with pool:` is for cuda; use pool.empty"
                raise ConfigurationError(message, setting="driver", value=self._shared.device.driver)
            self.attach_torch(TorchMemory(self, self._shared))
        assert self._torch is not None
        return self._torch

    def attach_torch(self, torch: TorchMemory) -> None:
        self._torch = torch
        self._shared.torch = (*self._shared.torch, torch)

    def _look(self) -> None:
        """Segments of torch that are new, or dead. Under the view."""
        if self._torch is not None and (born := self._torch.look()):
            self.segments = (*self.segments, *born)
            self.slept = False

    def _is_only_spare(self, segment: Segment) -> bool:
        return not any(s.shared and s.layout.empty and not s.dying for s in self.segments if s is not segment)

    def _growable(self) -> bool:
        residency, content = self.state
        return residency is Residency.RESIDENT and content is not Content.ON_HOST

    def _require_growable(self) -> None:
        residency, content = self.state
        if residency is not Residency.RESIDENT or content is Content.ON_HOST:
            state = f"pool {self.tag!r} is {residency.value}, its content {content.value}"
            raise StateError(f"{state}: call wake([{self.tag!r}]) before allocating in it", state=residency.value, tag=self.tag)

    def _place(self, nbytes: int) -> tuple[Segment, int]:
        """Room for ``nbytes``: in a shared region that has it, else in a new region."""
        for segment in self.segments:
            if segment.shared and not segment.dying and (offset := segment.layout.allocate(nbytes)) is not None:
                return segment, offset
        extent_bytes = self._shared.config.extent_bytes
        own = nbytes * OWN_REGION_FRACTION >= extent_bytes
        segment = self._grow(nbytes if own else max(nbytes, self._next_shared_bytes()), shared=not own)
        placed = segment.layout.allocate(nbytes)
        assert placed is not None
        return segment, placed

    def _next_shared_bytes(self) -> int:
        have = sum(s.nbytes for s in self.segments if s.shared)
        return min(self._shared.config.extent_bytes, max(FIRST_SHARED_BYTES, have))

    def _grow(self, nbytes: int, shared: bool) -> Segment:
        pinned = self._shared.unexplained_pins()  # first: the region may take the last descriptor, which looking needs
        region = self._shared.device.create_region(
            round_up(nbytes, ALIGN_BYTES),
            extent_bytes=self._shared.config.extent_bytes,
            exportable=bool(self.settings.exportable),
            guarded=bool(self.settings.guarded),
            name=self.tag,
        )
        segment = Segment(self, region, shared, pinned)
        with self._shared.view:
            self.segments = (*self.segments, segment)
        self.slept = False
        return segment
