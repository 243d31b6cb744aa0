"""Images in memory files that everybody may read and nobody can write to: taken when they are right, left when they are not any
more. Which files there are, and who makes them, is ``sharing.py``'s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from torpor._native import Device
from torpor.errors import DeviceError
from torpor.memory.backing import Backing
from torpor.memory.image import ChunkHasher, Image, Lease, image_of
from torpor.memory.layout import Hashes, Mask

if TYPE_CHECKING:
    from torpor.memory.segment import Segment
    from torpor.memory.sharing import Piece


class SharedImages:
    """Of one memory. Not thread-safe; called inside a transaction only."""

    def __init__(self, device: Device, backing: Backing, hasher: ChunkHasher) -> None:
        self._device = device
        self._backing = backing
        self._hasher = hasher

    def begin(self, segments: Sequence[Segment]) -> None:
        """Addresses for images of mapped segments, and nothing shared in them that has changed. HostMemoryError where the limit
        forbids such images."""
        self._backing.place_images(segments)
        self.keep({s: s.live(image_of(s).chunk_bytes) for s in segments})
        self._device.synchronize()

    def hash_device(self, segment: Segment, mask: Mask) -> Hashes:
        """Of these chunks of a mapped segment; 0 elsewhere."""
        return self._hasher.on_device(segment, mask)

    def scratch(self, nbytes: int) -> AbstractContextManager[int]:
        return self._backing.scratch(nbytes)

    def adopt(self, piece: Piece, descriptor: int) -> None:
        """The image's bytes where the piece is become those of the file, if they have the piece's hashes. The descriptor is the
        image's then. DeviceError, HostMemoryError: it stays the caller's, and the image has no memory there."""
        image = piece.image
        self._backing.adopt(image, piece.mask, descriptor, piece.offset)
        try:
            found = self._hasher.on_host(image, piece.mask, self._backing.address_of(image))
            if not np.array_equal(found[piece.mask], piece.hashes[piece.mask]):
                message = f"a shared image of tag {piece.segment.tag!r} does not hold what its name says"
                raise DeviceError(message, operation="share", code=0)
        except BaseException:
            self._backing.decommit(image, piece.mask & image.committed)
            raise
        image.hashes[piece.mask] = found[piece.mask]
        image.valid |= piece.mask
        image.shared |= piece.mask
        chunks = np.flatnonzero(piece.mask)
        self._backing.lease(image, Lease(int(chunks[0]), int(chunks[-1]) + 1, descriptor))

    def unshare(self, chunks: Mapping[Segment, Mask]) -> None:
        """Pieces that these chunks lie in are given back: whoever wants to write to an image needs one of its own."""
        for segment, mask in chunks.items():
            image = segment.image
            if image is not None:
                for lease in _leases_in(image, mask & image.shared):
                    piece = np.zeros_like(image.shared)
                    piece[lease.start : lease.stop] = image.shared[lease.start : lease.stop]
                    self._backing.decommit(image, piece)

    def keep(self, wanted: Mapping[Segment, Mask]) -> dict[Segment, Mask]:
        """Of the wanted chunks, those whose shared image is right: decided by their hash on the device, as for any other (M7).
        Pieces in which one is not are given back."""
        shared = {s: mask & s.image.shared for s, mask in wanted.items() if s.image is not None and (mask & s.image.shared).any()}
        if shared:
            self._device.synchronize()
        kept = {}
        for segment, mask in shared.items():
            image = image_of(segment)
            right = mask & image.valid & (self.hash_device(segment, mask) == image.hashes)
            self.unshare({segment: mask & ~right})
            kept[segment] = right & image.shared
        return kept


def _leases_in(image: Image, mask: Mask) -> Iterator[Lease]:
    yield from [x for x in image.leases if mask[x.start : x.stop].any()]
