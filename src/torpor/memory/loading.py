"""Filling tensors through their host images: the bytes reach the device by the fastest copy there is, and the image that the next
sleep needs exists already.

In steps, the three things that take time go on at once: host memory is taken (and page-locked) in the order of addresses, what
has memory is written by the caller, and chunks that are written go to the device and are checked there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torpor.errors import ConfigurationError, StateError
from torpor.memory import tensors as views
from torpor.memory.clock import Phases
from torpor.memory.futures import result_of
from torpor.memory.image import image_of
from torpor.memory.layout import Mask, round_up
from torpor.memory.pool import Pool
from torpor.memory.segment import ALIGN_BYTES, Segment
from torpor.memory.shared import Shared
from torpor.memory.types import Content, Residency

if TYPE_CHECKING:
    import torch

COPY_CHUNKS = 128  # go to the device together


@dataclass(frozen=True)
class _Place:
    tensor: torch.Tensor
    segment: Segment
    offset: int


class Staging:
    """What the caller of ``Memory.load_in_steps`` writes to, from any thread."""

    def __init__(self, loading: Loading, tensors: list[torch.Tensor]) -> None:
        self._loading = loading
        self.tensors = tensors  # like those asked for, over their bytes in the images; only those that are ready have memory

    def ready(self, index: int) -> None:
        """Blocks until tensor ``index`` can be written. HostMemoryError, DeviceError: it never will. StateError after the end."""
        self._loading.wait_for(index)

    def written(self, index: int) -> None:
        """Tensor ``index`` has its bytes, and is not written any more."""
        self._loading.note_written(index)


class Loading:
    """One call of ``Memory.load_in_steps`` or ``load_through_images``, under the transaction's lock."""

    def __init__(self, shared: Shared, pools: Iterable[Pool], tensors: Sequence[torch.Tensor]) -> None:
        """ConfigurationError, StateError as there."""
        self._shared = shared
        known = tuple(pools)
        self._places = {i: _place_of(tensor, known) for i, tensor in enumerate(tensors) if tensor.nbytes}
        self._tensors = tensors
        self._segments = list(dict.fromkeys(p.segment for p in self._places.values()))
        self._state = threading.Condition()
        self._missing: dict[Segment, Mask] = {}  # chunks without memory
        self._pending: dict[Segment, npt.NDArray[np.int64]] = {}  # tensors per chunk that are not written
        self._complete: dict[Segment, Mask] = {}  # written, and not sent
        self._unwritten = set(self._places)
        self._taken: list[tuple[Segment, Mask]] = []
        self._taking: Future[None] | None = None
        self._sending: list[Future[None]] = []
        self._closed = False
        self._taker, self._sender = ThreadPoolExecutor(1, "torpor-take"), ThreadPoolExecutor(1, "torpor-send")

    def begin(self) -> Staging:
        """HostMemoryError with nothing changed, DeviceError."""
        images, backing = self._shared.images, self._shared.backing
        touched = {s: self._touched(s) for s in self._segments}
        images.shared.unshare(touched)
        backing.place_images(self._segments)
        neighbours = {s: mask & ~self._whole(s, mask) for s, mask in touched.items()}
        if any(mask.any() for mask in neighbours.values()):
            # What others have in the same chunks must be in the image before these chunks go to the device.
            images.save(self._segments, Phases(), only=neighbours)
        images.doubt(touched)
        for segment in self._segments:
            self._missing[segment] = backing.missing(segment)
            self._pending[segment] = self._writers(segment)
            self._complete[segment] = np.zeros_like(touched[segment])
        self._taking = self._taker.submit(self._take_memory)
        where = {i: backing.address_of(image_of(p.segment)) + p.offset for i, p in self._places.items()}
        return Staging(self, [_host_view(t, where.get(i, 0)) for i, t in enumerate(self._tensors)])

    def wait_for_all(self) -> None:
        """All memory is there. HostMemoryError: nothing has changed."""
        assert self._taking is not None
        with self._shared.backing.waits:
            result_of(self._taking)

    def finish(self) -> None:
        """Copies to the device what was not told to be written, and waits until all is there and checked. HostMemoryError,
        DeviceError: the tensors may hold anything; load again."""
        self.wait_for_all()
        for index in list(self._unwritten):
            self.note_written(index)
        with self._state:
            self._send(1)
        while self._sending:
            result_of(self._sending.pop(0))

    def close(self) -> None:
        """Nothing goes on any more."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        for sent in self._sending:
            sent.cancel()
        self._taker.shutdown()
        self._sender.shutdown()
        if self._taking is not None and self._taking.exception() is not None:
            # Not before: the caller may have been writing to what it was told is there.
            self._shared.backing.give_back(self._taken)
        # An error that is kept keeps this object, by way of its traceback; it must not keep the tensors.
        self._sending, self._taking, self._places, self._tensors = [], None, {}, ()

    # ---- steps, on any thread -----------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        if self._closed:
            raise StateError("the load has ended: what it lent must not be written any more", state="closed")

    def wait_for(self, index: int) -> None:
        self.require_open()
        place = self._places.get(index)
        if place is None:
            return
        chunks = slice(*self._chunk_range(place))
        missing = self._missing[place.segment][chunks]
        if not missing.any():
            return
        with self._shared.backing.waits, self._state:
            while missing.any():
                self.require_open()
                if self._taking is not None and self._taking.done():
                    result_of(self._taking)
                self._state.wait(0.05)

    def note_written(self, index: int) -> None:
        with self._state:
            self.require_open()
            if index not in self._unwritten:
                return
            self._unwritten.remove(index)
            place = self._places[index]
            chunks = slice(*self._chunk_range(place))
            pending = self._pending[place.segment]
            pending[chunks] -= 1
            self._complete[place.segment][chunks] |= pending[chunks] == 0
            self._send(COPY_CHUNKS)

    def _take_memory(self) -> None:
        for segment in self._segments:
            self._shared.backing.provide_in_parts(segment, self._note_memory)

    def _note_memory(self, segment: Segment, part: Mask) -> None:
        self._taken.append((segment, part))
        with self._state:
            self._missing[segment] &= ~part
            self._state.notify_all()

    def _send(self, least: int) -> None:
        """To the device, when so many chunks are complete."""
        if sum(int(mask.sum()) for mask in self._complete.values()) >= least:
            batch = {s: mask.copy() for s, mask in self._complete.items() if mask.any()}
            for mask in self._complete.values():
                mask[:] = False
            self._sending.append(self._sender.submit(self._shared.images.load, batch))

    # ---- where things lie ---------------------------------------------------------------------------------------------------

    @property
    def _chunk_bytes(self) -> int:
        return self._shared.config.chunk_bytes

    def _in(self, segment: Segment) -> list[_Place]:
        return [p for p in self._places.values() if p.segment is segment]

    def _spans(self, segment: Segment) -> list[tuple[int, int]]:
        """[start, end) of what is loaded, with the padding that belongs to it."""
        return [_span_of(p) for p in self._in(segment)]

    def _chunk_range(self, place: _Place) -> tuple[int, int]:
        start, end = _span_of(place)
        return start // self._chunk_bytes, -(-end // self._chunk_bytes)

    def _touched(self, segment: Segment) -> Mask:
        mask = np.zeros_like(segment.live(self._chunk_bytes))
        for place in self._in(segment):
            mask[slice(*self._chunk_range(place))] = True
        return mask

    def _writers(self, segment: Segment) -> npt.NDArray[np.int64]:
        """Per chunk, how many of the tensors lie in it."""
        out = np.zeros(len(segment.live(self._chunk_bytes)), dtype=np.int64)
        for place in self._in(segment):
            out[slice(*self._chunk_range(place))] += 1
        return out

    def _whole(self, segment: Segment, touched: Mask) -> Mask:
        """Chunks in which nothing lives but what is loaded."""
        loaded = _bytes_per_chunk(_merged(self._spans(segment)), len(touched), self._chunk_bytes)
        living = _bytes_per_chunk([(o, o + size) for o, size in segment.layout.pieces], len(touched), self._chunk_bytes)
        return loaded >= living


def _span_of(place: _Place) -> tuple[int, int]:
    return place.offset, min(place.segment.nbytes, place.offset + round_up(place.tensor.nbytes, ALIGN_BYTES))


def _place_of(tensor: torch.Tensor, pools: Sequence[Pool]) -> _Place:
    address = tensor.data_ptr()
    found = next(((p, s) for p in pools for s in p.segments if s.covers(address)), None)
    if found is None:
        raise ConfigurationError("a tensor to load lies in no pool of this memory", setting="tensors")
    if not tensor.is_contiguous():
        raise ConfigurationError("a tensor to load is not contiguous", setting="tensors", value=str(tuple(tensor.shape)))
    pool, segment = found
    residency, content = pool.state
    if residency is not Residency.RESIDENT or content is Content.ON_HOST:
        raise StateError(f"tag {pool.tag!r} is {residency.value}: wake([{pool.tag!r}]) first", state=residency.value)
    return _Place(tensor, segment, address - segment.address)


def _host_view(tensor: torch.Tensor, address: int) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if tensor.nbytes == 0:
        return views.empty_nowhere(shape, tensor.dtype, None)
    return views.tensor_at(address, tensor.nbytes, shape, tensor.dtype, None, lambda: None)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without overlaps: tensors may share bytes."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def _bytes_per_chunk(spans: Iterable[tuple[int, int]], count: int, chunk_bytes: int) -> npt.NDArray[np.int64]:
    """How many bytes of each chunk the spans, which do not overlap, cover."""
    out = np.zeros(count, dtype=np.int64)
    for start, end in spans:
        first, last = start // chunk_bytes, (end - 1) // chunk_bytes
        out[first : last + 1] += chunk_bytes
        out[first] -= start - first * chunk_bytes
        out[last] -= (last + 1) * chunk_bytes - end
    return out
