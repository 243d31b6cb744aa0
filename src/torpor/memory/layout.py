"""Where pieces lie in a range: used for tensors in a region and for images in the arena."""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from torpor.errors import BugError

Mask = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]


def round_up(value: int, align: int) -> int:
    return -(-value // align) * align


class FreeList:
    """Offsets in ``[0, nbytes)``: first fit, neighbours coalesce. Sizes are rounded up to ``align``. Not thread-safe."""

    def __init__(self, nbytes: int, align: int) -> None:
        self.nbytes = nbytes
        self._align = align
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # (offset, bytes), by offset, no two touch
        self._used: dict[int, int] = {}
        self.used_bytes = 0

    @property
    def empty(self) -> bool:
        return not self._used

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what is handed out, in no order."""
        return list(self._used.items())

    def allocate(self, nbytes: int) -> int | None:
        """The offset, or None when no free piece is large enough."""
        want = round_up(nbytes, self._align)
        for index, (offset, size) in enumerate(self._free):
            if size >= want:
                self._free[index : index + 1] = [(offset + want, size - want)] if size > want else []
                self._used[offset] = want
                self.used_bytes += want
                return offset
        return None

    def free(self, offset: int) -> None:
        size = self._used.pop(offset)
        self.used_bytes -= size
        index = bisect.bisect(self._free, (offset, 0))
        start, end = offset, offset + size
        low = high = index
        if index > 0 and sum(self._free[index - 1]) == start:
            low, start = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            high, end = index + 1, sum(self._free[index])
        self._free[low:high] = [(start, end - start)]

    def check(self) -> None:
        """BugError unless free and used pieces tile the range, aligned, with no two free ones touching."""
        tiles = sorted([(o, s, True) for o, s in self._used.items()] + [(o, s, False) for o, s in self._free])
        end, was_free = 0, False
        for offset, size, used in tiles:
            if offset != end or size <= 0 or offset % self._align or (was_free and not used):
                raise BugError(f"the layout of {self.nbytes} bytes is broken at offset {offset}")
            end, was_free = offset + size, not used
        if end != self.nbytes:
            raise BugError(f"the layout of {self.nbytes} bytes ends at {end}")


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    return -(-nbytes // chunk_bytes)


def chunks_of(layout: FreeList, chunk_bytes: int) -> Mask:
    """One flag per chunk: something handed out lies in it."""
    mask = np.zeros(chunk_count(layout.nbytes, chunk_bytes), dtype=np.bool_)
    for offset, size in layout.pieces:
        mask[offset // chunk_bytes : chunk_count(offset + size, chunk_bytes)] = True
    return mask


def runs(mask: Mask) -> list[tuple[int, int]]:
    """[start, stop) of every stretch of set flags."""
    framed = np.zeros(len(mask) + 2, dtype=np.bool_)  # not np.diff: a sleep asks several times per region, and that takes longer
    framed[1:-1] = mask
    edges = np.flatnonzero(framed[1:] != framed[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def byte_runs(mask: Mask, chunk_bytes: int, nbytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of every stretch of set chunks in a range of ``nbytes``, whose last chunk may be shorter."""
    return [(a * chunk_bytes, min(b * chunk_bytes, nbytes) - a * chunk_bytes) for a, b in runs(mask)]
