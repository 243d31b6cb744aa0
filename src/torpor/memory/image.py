"""One region's content in host memory, by chunks, each with the hash that proves it.

A chunk of an image is believed only while its flag says so. It is cleared before the chunk is overwritten and set after the bytes
were read back and hashed, so a copy that fails half way leaves no chunk in doubt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torpor._native import Device
from torpor.errors import BugError
from torpor.memory.layout import Hashes, Mask, byte_runs, chunk_count, runs

if TYPE_CHECKING:
    from torpor.memory.segment import Segment


@dataclass(eq=False)
class Lease:
    """A memory file that backs chunks [start, stop) of an image. Open as long: that is how others find it."""

    start: int
    stop: int
    descriptor: int


class Image:
    """One region's content: ``nbytes`` of the arena from ``offset`` on."""

    def __init__(self, offset: int, nbytes: int, chunk_bytes: int) -> None:
        count = chunk_count(nbytes, chunk_bytes)
        self.offset = offset
        self.nbytes = nbytes
        self.chunk_bytes = chunk_bytes
        self.hashes: Hashes = np.zeros(count, dtype=np.uint64)
        self.valid: Mask = np.zeros(count, dtype=np.bool_)  # the arena holds bytes with this hash
        self.committed: Mask = np.zeros(count, dtype=np.bool_)  # the arena has memory there
        self.shared: Mask = np.zeros(count, dtype=np.bool_)  # of that, what others may have too: nobody can write to it
        self.leases: list[Lease] = []

    def byte_runs(self, mask: Mask) -> list[tuple[int, int]]:
        return byte_runs(mask, self.chunk_bytes, self.nbytes)

    def bytes_in(self, mask: Mask) -> int:
        missing = len(mask) * self.chunk_bytes - self.nbytes  # of the last chunk
        return int(np.count_nonzero(mask)) * self.chunk_bytes - (missing if len(mask) and mask[-1] else 0)

    @property
    def committed_bytes(self) -> int:
        return self.bytes_in(self.committed)

    @property
    def shared_bytes(self) -> int:
        return self.bytes_in(self.shared)


def image_of(segment: Segment) -> Image:
    """BugError when it has none."""
    if segment.image is None:
        raise BugError(f"a region of tag {segment.tag!r} has no image", tag=segment.tag)
    return segment.image


def parts_of(mask: Mask, most: int | None = None) -> Iterator[Mask]:
    """``mask`` in pieces of one stretch each, of at most so many chunks."""
    for start, stop in runs(mask):
        for first in range(start, stop, most or stop - start):
            part = np.zeros_like(mask)
            part[first : min(stop, first + (most or stop))] = True
            yield part


class ChunkHasher:
    """Hashes chunks where they lie."""

    def __init__(self, device: Device, threads: int) -> None:
        self._device = device
        self._threads = threads

    def on_device(self, segment: Segment, mask: Mask) -> Hashes:
        """Of these chunks of a mapped segment that has an image; 0 elsewhere."""
        return self._hash(image_of(segment), mask, segment.address, on_host=False)

    def on_host(self, image: Image, mask: Mask, address: int) -> Hashes:
        """Of these chunks of the image, which begins at ``address``; 0 elsewhere."""
        return self._hash(image, mask, address, on_host=True)

    def _hash(self, image: Image, mask: Mask, base: int, *, on_host: bool) -> Hashes:
        out = np.zeros_like(image.hashes)
        for (start, stop), (offset, size) in zip(runs(mask), image.byte_runs(mask), strict=True):
            out[start:stop] = self._device.hash_chunks(
                base + offset, size, image.chunk_bytes, on_host=on_host, threads=self._threads
            )
        return out
