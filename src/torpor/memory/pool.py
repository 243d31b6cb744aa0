"""Pools: the regions of one tag, and tensors in them."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from torpor.errors import ConfigurationError, DeviceError, StateError
from torpor.memory import tensors
from torpor.memory.layout import round_up
from torpor.memory.procfs import pinned_bytes
from torpor.memory.segment import ALIGN_BYTES, Segment
from torpor.memory.settings import PoolSettings
from torpor.memory.shared import Shared
from torpor.memory.types import Content, Residency, TagStats

if TYPE_CHECKING:
    import torch

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

    def __repr__(self) -> str:
        return f"<Pool {self.tag!r}: {len(self.segments)} regions>"

    # ---- for everybody -----------------------------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        return self._state()[0]

    @property
    def content(self) -> Content:
        return self._state()[1]

    def empty(self, shape: tensors.Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised contiguous tensor in this pool, 256-byte aligned. Its address never changes (M1); the memory is taken
        back when its storage dies. One without elements lies in no pool.

        StateError while the pool is not resident (M10); DeviceMemoryError.
        """
        sizes = tensors.checked_shape(shape)
        nbytes, kind = tensors.bytes_of(sizes, dtype)
        if nbytes == 0:
            return tensors.empty_nowhere(sizes, kind, self._shared.torch_ordinal)
        with self._shared.structure():
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
            self._require_growable()
            self._grow(nbytes, shared=True)

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensors.storage_address(tensor)
        return any(s.covers(address) for s in self.segments)

    def stats(self) -> TagStats:
        """A snapshot. Never waits for a sleep or wake under way."""
        with self._shared.view:
            segments = self.segments
            resident = sum(s.nbytes for s in segments if s.mapped)
        residency, content = self._state()
        return TagStats(
            tag=self.tag,
            residency=residency,
            content=content,
            regions=len(segments),
            reserved_bytes=sum(s.nbytes for s in segments),
            resident_bytes=resident,
            allocated_bytes=sum(s.layout.used_bytes for s in segments),
            image_bytes=sum(s.image_bytes for s in segments),
            exported=any(s.exported for s in segments),
            hooks=self._shared.hooks.count(self.tag),
            hooks_away=self._shared.hooks.away(self.tag),
        )

    # ---- for the memory layer, under its lock ------------------------------------------------------------------------------

    def mapped_segments(self) -> list[Segment]:
        with self._shared.view:
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
        state, until a later call."""
        for segment in [s for s in self.segments if s.dying]:
            with contextlib.suppress(DeviceError):
                self.destroy(segment)

    def destroy(self, segment: Segment) -> None:
        """DeviceError: it is still there, and the call can be retried."""
        self._shared.images.release(segment)
        with self._shared.view:
            segment.region.destroy()
            self.segments = tuple(s for s in self.segments if s is not segment)

    def _state(self) -> tuple[Residency, Content]:
        with self._shared.view:
            living = [s for s in self.segments if not s.dying]
            mapped = [s.mapped for s in living]
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

    def _is_only_spare(self, segment: Segment) -> bool:
        return not any(s.shared and s.layout.empty and not s.dying for s in self.segments if s is not segment)

    def _require_growable(self) -> None:
        residency, content = self._state()
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
        region = self._shared.device.create_region(
            round_up(nbytes, ALIGN_BYTES),
            extent_bytes=self._shared.config.extent_bytes,
            exportable=bool(self.settings.exportable),
            guarded=bool(self.settings.guarded),
            name=self.tag,
        )
        segment = Segment(self, region, shared, pinned_bytes())
        self.segments = (*self.segments, segment)
        self.slept = False
        return segment
