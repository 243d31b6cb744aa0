"""Filling tensors through their host images: the bytes reach the device by the fastest copy there is, and the image that the next
sleep needs exists already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torpor.errors import ConfigurationError, StateError
from torpor.memory import tensors as views
from torpor.memory.clock import Phases
from torpor.memory.layout import Mask, round_up
from torpor.memory.pool import Pool
from torpor.memory.segment import ALIGN_BYTES, Segment
from torpor.memory.shared import Shared
from torpor.memory.types import Content, Residency

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Place:
    tensor: torch.Tensor
    segment: Segment
    offset: int


class Loading:
    """One call of ``Memory.load_through_images``, under the transaction's lock."""

    def __init__(self, shared: Shared, pools: Iterable[Pool], tensors: Sequence[torch.Tensor]) -> None:
        """ConfigurationError, StateError as there."""
        self._shared = shared
        known = tuple(pools)
        self._places = [_place_of(tensor, known) for tensor in tensors if tensor.nbytes]
        self._tensors = tensors
        self._segments = list(dict.fromkeys(p.segment for p in self._places))

    def begin(self) -> list[torch.Tensor]:
        """Tensors like those asked for, over their bytes in the images. HostMemoryError with nothing changed, DeviceError."""
        images, chunk_bytes = self._shared.images, self._shared.config.chunk_bytes
        images.provide(self._segments)
        touched = {s: self._touched(s, chunk_bytes) for s in self._segments}
        # What others have in the same chunks must be in the image before these chunks go to the device.
        images.save(self._segments, Phases(), only={s: mask & ~self._whole(s, mask) for s, mask in touched.items()})
        self._touched_of = touched
        images.doubt(touched)
        where = {id(p.tensor): images.address_of(p.segment) + p.offset for p in self._places}
        return [_host_view(t, where.get(id(t), 0)) for t in self._tensors]

    def finish(self) -> None:
        """Copies the images' bytes to the device and checks them. DeviceError: the tensors may hold anything; load again."""
        self._shared.images.load(self._touched_of)

    def _spans(self, segment: Segment) -> list[tuple[int, int]]:
        """[start, end) of what is loaded, with the padding that belongs to it."""
        places = [p for p in self._places if p.segment is segment]
        return [(p.offset, min(segment.nbytes, p.offset + round_up(p.tensor.nbytes, ALIGN_BYTES))) for p in places]

    def _touched(self, segment: Segment, chunk_bytes: int) -> Mask:
        mask = np.zeros_like(segment.live(chunk_bytes))
        for start, end in self._spans(segment):
            mask[start // chunk_bytes : -(-end // chunk_bytes)] = True
        return mask

    def _whole(self, segment: Segment, touched: Mask) -> Mask:
        """Chunks in which nothing lives but what is loaded."""
        chunk_bytes = self._shared.config.chunk_bytes
        loaded = _bytes_per_chunk(_merged(self._spans(segment)), len(touched), chunk_bytes)
        living = _bytes_per_chunk([(o, o + size) for o, size in segment.layout.pieces], len(touched), chunk_bytes)
        return loaded >= living


def _place_of(tensor: torch.Tensor, pools: Sequence[Pool]) -> _Place:
    address = tensor.data_ptr()
    found = next(((p, s) for p in pools for s in p.segments if s.covers(address)), None)
    if found is None:
        raise ConfigurationError("a tensor to load lies in no pool of this memory", setting="tensors")
    if not tensor.is_contiguous():
        raise ConfigurationError("a tensor to load is not contiguous", setting="tensors", value=str(tuple(tensor.shape)))
    pool, segment = found
    if pool.residency is not Residency.RESIDENT or pool.content is Content.ON_HOST:
        raise StateError(f"tag {pool.tag!r} is {pool.residency.value}: wake([{pool.tag!r}]) first", state=pool.residency.value)
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
