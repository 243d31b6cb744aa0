"""Host images: the content of sleeping regions in one arena of host memory, by chunks, each with the hash that proves it.

A chunk of an image is believed only while its flag says so. It is cleared before the chunk is overwritten and set after the bytes
were read back and hashed, so a copy that fails half way leaves no chunk in doubt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torpor._native import Arena, ChunkImage, Device
from torpor.errors import BugError, DeviceError, HostMemoryError, StateError
from torpor.memory.clock import Phases
from torpor.memory.config import PAGE_BYTES
from torpor.memory.layout import FreeList, Hashes, Mask, byte_runs, chunk_count, runs
from torpor.memory.procfs import host_memory_bytes

if TYPE_CHECKING:
    from torpor.memory.segment import Segment
    from torpor.memory.sharing import Piece

COMMIT_CHUNKS = 128  # at a time: whoever waits for the first need not wait for all
COPY_ROUNDS = 3  # how often a chunk that changes under the copy is tried


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
        return sum(size for _, size in self.byte_runs(mask))

    @property
    def committed_bytes(self) -> int:
        return self.bytes_in(self.committed)

    @property
    def shared_bytes(self) -> int:
        return self.bytes_in(self.shared)


class _Job:
    """What one segment needs of a save or a restore."""

    def __init__(self, segment: Segment, live: Mask) -> None:
        self.segment = segment
        self.image = _image_of(segment)
        self.live = live
        self.todo: Mask = self.live.copy()
        self.copied_bytes = 0
        self.source: Hashes = np.zeros_like(self.image.hashes)
        self.checked: Hashes = np.zeros_like(self.image.hashes)

    def for_device(self, arena_address: int) -> ChunkImage:
        image = self.image
        return ChunkImage(
            device_address=self.segment.address,
            host_address=arena_address + image.offset,
            nbytes=image.nbytes,
            wanted=self.todo,
            valid=image.valid,
            known=image.hashes,
            source=self.source,
            checked=self.checked,
        )


class ImageStore:
    """All images of one memory. Not thread-safe; called inside a transaction only."""

    def __init__(self, device: Device, chunk_bytes: int, limit_bytes: int | None, threads: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._limit_bytes = limit_bytes
        self._threads = threads
        self._arena: Arena | None = None
        self._space: FreeList | None = None
        self._leases: set[Lease] = set()
        self._scratch: list[Arena] = []  # more than one only where the driver did not let go
        self.committed_bytes = 0

    def save(self, segments: Sequence[Segment], phases: Phases, only: Mapping[Segment, Mask] | None = None) -> dict[Segment, int]:
        """Brings the images of mapped segments up to date; gives back the bytes copied for each (M7).

        Returns with every live chunk valid (of those in ``only``, if given), checked by hash (M4). HostMemoryError: no image has
        more memory than before, and what was valid, private and unchanged still is. StateError when somebody keeps writing
        meanwhile.
        """
        wanted = {s: s.live(self._chunk_bytes) if only is None else only[s] for s in segments}
        with phases("save"):
            kept = self._keep_shared(wanted)
        with phases("commit"):
            self.provide(segments)
        jobs = [_Job(s, wanted[s] & ~kept[s] if s in kept else wanted[s]) for s in segments]
        for _ in range(COPY_ROUNDS):
            with phases("save"):
                self._save(jobs)
            if not any(job.todo.any() for job in jobs):
                break
        else:
            raise self._unsteady(jobs)
        for segment in segments:
            self.trim(segment)
        return {job.segment: job.copied_bytes for job in jobs}

    def restore(
        self,
        segments: Iterable[Segment],
        phases: Phases,
        to_map: Sequence[Segment] = (),
        mapped: Callable[[], None] | None = None,
    ) -> dict[Segment, int]:
        """Copies images into their segments and checks what arrived; gives back the bytes. The images stay as they are.

        The segments are mapped, or among those ``to_map``, which get their memory meanwhile; ``mapped`` is called once they
        have it, while the copies go on."""
        jobs = [_Job(s, s.live(self._chunk_bytes)) for s in segments if not s.layout.empty]
        for job in jobs:
            if not job.image.valid[job.live].all():
                raise BugError(f"the image of a region of tag {job.segment.tag!r} is not complete", tag=job.segment.tag)
        with phases("restore"):
            if jobs or to_map:
                self._restore(jobs, to_map, mapped)
        return {job.segment: job.image.bytes_in(job.live) for job in jobs}

    def doubt(self, chunks: Mapping[Segment, Mask]) -> None:
        """Somebody is about to write these chunks of images: they are not believed until ``load``."""
        for segment, mask in chunks.items():
            _image_of(segment).valid &= ~mask

    def load(self, chunks: Mapping[Segment, Mask]) -> None:
        """Copies these chunks of images to their mapped segments, checks what arrived, and believes them from then on. The
        images' own hashes are computed beside the copies. DeviceError when something else arrived."""
        jobs = [_Job(s, mask) for s, mask in chunks.items()]
        with ThreadPoolExecutor(1) as beside:
            hashes = [beside.submit(self._hash_image, job) for job in jobs]
            self._device.restore_chunks(self._for_device(jobs), self._chunk_bytes, threads=self._threads)
        for job, found in zip(jobs, hashes, strict=True):
            job.image.hashes[job.live] = found.result()[job.live]
            self._require_arrived(job, "what was loaded; load it again")
        for job in jobs:
            job.image.valid |= job.live

    # ---- shared with other processes ----------------------------------------------------------------------------------------

    def begin_sharing(self, segments: Sequence[Segment]) -> None:
        """Addresses for images of mapped segments, and nothing shared in them that has changed. HostMemoryError where the limit
        forbids such images."""
        self.place_images(segments)
        self._keep_shared({s: s.live(self._chunk_bytes) for s in segments})
        self._device.synchronize()

    def image_of(self, segment: Segment) -> Image:
        return _image_of(segment)

    def hash_device(self, segment: Segment, mask: Mask) -> Hashes:
        """Of these chunks of a mapped segment; 0 elsewhere."""
        return self._hash_at(_image_of(segment), mask, segment.address, on_host=False)

    def adopt(self, piece: Piece, descriptor: int) -> None:
        """The image's bytes where the piece is become those of the file, if they have the piece's hashes. The descriptor is the
        image's then. DeviceError, HostMemoryError: it stays the caller's, and the image has no memory there."""
        image = piece.image
        self._decommit(image, piece.mask & image.committed)
        try:
            for part in _parts(piece.mask):
                self._adopt_part(image, part, descriptor, piece.offset)
            found = self._hash_at(image, piece.mask, self._arena_memory().address + image.offset, on_host=True)
            if not np.array_equal(found[piece.mask], piece.hashes[piece.mask]):
                message = f"a shared image of tag {piece.segment.tag!r} does not hold what its name says"
                raise DeviceError(message, operation="share", code=0)
        except BaseException:
            self._decommit(image, piece.mask & image.committed)
            raise
        image.hashes[piece.mask] = found[piece.mask]
        image.valid |= piece.mask
        image.shared |= piece.mask
        chunks = np.flatnonzero(piece.mask)
        lease = Lease(int(chunks[0]), int(chunks[-1]) + 1, descriptor)
        image.leases.append(lease)
        self._leases.add(lease)

    def unshare(self, chunks: Mapping[Segment, Mask]) -> None:
        """Pieces that these chunks lie in are given back: whoever wants to write to an image needs one of its own."""
        for segment, mask in chunks.items():
            image = segment.image
            if image is not None:
                for lease in [x for x in image.leases if (mask & image.shared)[x.start : x.stop].any()]:
                    self._drop(image, lease)

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[int]:
        """The address of host memory as fast as an image's, for the length of the block. HostMemoryError, DeviceError.

        An arena of its own: taking memory away from one refuses copies in all of it meanwhile."""
        arena = self._device.create_arena(nbytes)
        self._scratch.append(arena)
        try:
            arena.commit(0, nbytes, self._threads)
            yield arena.address
        finally:
            arena.close()
            self._scratch.remove(arena)

    def _adopt_part(self, image: Image, part: Mask, descriptor: int, file_start: int) -> None:
        [(offset, size)] = image.byte_runs(part)
        self._arena_memory().adopt(image.offset + offset, size, descriptor, offset - file_start, self._threads)
        image.committed |= part
        self.committed_bytes += size

    def _keep_shared(self, wanted: Mapping[Segment, Mask]) -> dict[Segment, Mask]:
        """Of the wanted chunks, those whose shared image is right: decided by their hash on the device, as for any other (M7).
        Pieces in which one is not are given back."""
        shared = {s: mask & s.image.shared for s, mask in wanted.items() if s.image is not None and (mask & s.image.shared).any()}
        if shared:
            self._device.synchronize()
        kept = {}
        for segment, mask in shared.items():
            image = _image_of(segment)
            right = mask & image.valid & (self.hash_device(segment, mask) == image.hashes)
            self.unshare({segment: mask & ~right})
            kept[segment] = right & image.shared
        return kept

    def _drop(self, image: Image, lease: Lease) -> None:
        mask = np.zeros_like(image.shared)
        mask[lease.start : lease.stop] = image.shared[lease.start : lease.stop]
        self._decommit(image, mask)

    def _end_leases(self, image: Image) -> None:
        """Of files that no chunk lies in any more."""
        for lease in [x for x in image.leases if not image.shared[x.start : x.stop].any()]:
            image.leases.remove(lease)
            self._leases.remove(lease)
            os.close(lease.descriptor)

    # ---- given back ---------------------------------------------------------------------------------------------------------

    def release(self, segment: Segment) -> None:
        """Gives the segment's image back. After a DeviceError what is left of it is not believed, and a retry goes on."""
        image = segment.image
        if image is not None:
            self._decommit(image, image.committed.copy())
            self._arena_space().free(image.offset)
            segment.image = None

    def trim(self, segment: Segment) -> None:
        """Gives back the chunks of the image that no tensor lies in any more."""
        image = segment.image
        if image is not None:
            self._decommit(image, image.committed & ~segment.live(image.chunk_bytes))

    def close(self) -> None:
        """Idempotent. Every image is gone."""
        while self._scratch:
            self._scratch[-1].close()
            self._scratch.pop()
        if self._arena is not None:
            self._arena.close()
            self._arena = self._space = None
            self.committed_bytes = 0
            for lease in self._leases:
                os.close(lease.descriptor)
            self._leases.clear()

    def check(self, segments: Iterable[Segment]) -> None:
        """BugError when arena, images and count disagree."""
        images = [s.image for s in segments if s.image is not None]
        if sum(i.committed_bytes for i in images) != self.committed_bytes:
            raise BugError(f"images count {self.committed_bytes} bytes of host memory, which is not their sum")
        if any((i.valid & ~i.committed).any() for i in images):
            raise BugError("an image is believed where it has no memory")
        if any((i.shared & ~i.valid).any() for i in images) or {x for i in images for x in i.leases} != self._leases:
            raise BugError("an image has shared chunks that are not right, or files that nobody counts")
        if self._space is not None:
            self._space.check()
            if sorted(o for o, _ in self._space.pieces) != sorted(i.offset for i in images):
                raise BugError("the arena hands out what no image has")

    def address_of(self, segment: Segment) -> int:
        """Where the image of a region begins. BugError when it has none."""
        return self._arena_memory().address + _image_of(segment).offset

    # ---- memory ------------------------------------------------------------------------------------------------------------

    def provide(self, segments: Sequence[Segment]) -> None:
        """Memory for every live chunk of the segments' images, or HostMemoryError with nothing changed."""
        self._require_room(segments)
        made: list[Segment] = []
        committed: list[tuple[Segment, Mask]] = []
        try:
            for segment in segments:
                if segment.image is None:
                    segment.image = self._new_image(segment.nbytes)
                    made.append(segment)
                self.provide_in_parts(segment, lambda segment, part: committed.append((segment, part)))
        except BaseException:
            self.give_back(committed)
            for segment in made:
                self.release(segment)
            raise

    def provide_in_parts(self, segment: Segment, on_part: Callable[[Segment, Mask], None]) -> None:
        """Memory for every live chunk of an image that has its addresses. ``on_part`` hears, in the order of addresses, of every
        part that has it now. After an error those parts keep it: somebody may be using them."""
        image = _image_of(segment)
        for part in _parts(self.missing(segment), COMMIT_CHUNKS):
            self._commit(image, part)
            on_part(segment, part)

    def give_back(self, parts: Iterable[tuple[Segment, Mask]]) -> None:
        for segment, part in parts:
            self._decommit(_image_of(segment), part)

    def place_images(self, segments: Sequence[Segment]) -> None:
        """Addresses for images, without memory. HostMemoryError where the limit forbids them."""
        self._require_room(segments)
        for segment in segments:
            if segment.image is None:
                segment.image = self._new_image(segment.nbytes)

    def missing(self, segment: Segment) -> Mask:
        """Chunks that an image has to hold and has no memory for."""
        return segment.live(self._chunk_bytes) & ~_image_of(segment).committed

    def _require_room(self, segments: Sequence[Segment]) -> None:
        needed = sum(_missing_bytes(s, self._chunk_bytes) for s in segments)
        if self._limit_bytes is not None and self.committed_bytes + needed > self._limit_bytes:
            raise HostMemoryError(
                f"host images need {needed} bytes more; of host_limit_bytes={self._limit_bytes}, {self.committed_bytes} are used",
                bytes_needed=needed,
                bytes_free=max(0, self._limit_bytes - self.committed_bytes),
                setting="host_limit_bytes",
            )

    def _new_image(self, nbytes: int) -> Image:
        return Image(self._place(nbytes), nbytes, self._chunk_bytes)

    def _place(self, nbytes: int) -> int:
        if self._arena is None:
            # Address space only. Twice the machine's memory, so that holes between images never matter.
            size = 2 * host_memory_bytes()
            self._arena = self._device.create_arena(size)
            self._space = FreeList(size, PAGE_BYTES)
        offset = self._arena_space().allocate(nbytes)
        if offset is None:
            raise HostMemoryError(f"no room for an image of {nbytes} bytes", bytes_needed=nbytes, bytes_free=0)
        return offset

    def _commit(self, image: Image, part: Mask) -> None:
        [(offset, size)] = image.byte_runs(part)
        self._arena_memory().commit(image.offset + offset, size, self._threads)
        image.committed |= part
        self.committed_bytes += size

    def _decommit(self, image: Image, mask: Mask) -> None:
        image.valid &= ~mask
        for part in _parts(mask):
            [(offset, size)] = image.byte_runs(part)
            self._arena_memory().decommit(image.offset + offset, size)
            image.committed &= ~part
            image.shared &= ~part
            self.committed_bytes -= size
        self._end_leases(image)

    def _arena_space(self) -> FreeList:
        assert self._space is not None
        return self._space

    def _arena_memory(self) -> Arena:
        assert self._arena is not None
        return self._arena

    # ---- bytes -------------------------------------------------------------------------------------------------------------

    def _save(self, jobs: Sequence[_Job]) -> None:
        """One round: copies chunks whose image is not right, and believes those whose copy has the hash of the source; the rest
        stays to do. DeviceError when a copy is wrong and its source did not change."""
        before = [(job.image.valid.copy(), job.image.hashes.copy()) for job in jobs]
        self._device.save_chunks(self._for_device(jobs), self._chunk_bytes, threads=self._threads)
        for job, (was_valid, known) in zip(jobs, before, strict=True):
            self._believe(job, was_valid & (known == job.source))
        for job in jobs:
            if job.todo.any() and (self._hash(job) == job.source)[job.todo].any():
                raise DeviceError(f"copying tag {job.segment.tag!r} to the host changed its bytes", operation="copy", code=0)

    def _believe(self, job: _Job, unchanged: Mask) -> None:
        image = job.image
        dirty = job.todo & ~image.valid
        job.copied_bytes += image.bytes_in(dirty & ~unchanged)
        right = dirty & (job.checked == job.source)
        image.hashes[right] = job.source[right]
        image.valid |= right
        job.todo = dirty & ~right

    def _restore(self, jobs: Sequence[_Job], to_map: Sequence[Segment], mapped: Callable[[], None] | None) -> None:
        images = self._for_device(jobs)
        if to_map:
            self._device.wake([s.region for s in to_map], images, self._chunk_bytes, threads=self._threads, mapped=mapped)
        else:
            self._device.restore_chunks(images, self._chunk_bytes, threads=self._threads)
        for job in jobs:
            self._require_arrived(job, "what was put to sleep; discard the tag and fill it anew")

    def _require_arrived(self, job: _Job, what: str) -> None:
        wrong = int((job.checked != job.image.hashes)[job.live].sum())
        if wrong:
            message = f"{wrong} chunks of tag {job.segment.tag!r} are not {what}"
            raise DeviceError(message, operation="restore", code=0, tag=job.segment.tag, chunks=wrong)

    def _for_device(self, jobs: Sequence[_Job]) -> list[ChunkImage]:
        return [job.for_device(self._arena_memory().address) for job in jobs if job.todo.any()]

    def _unsteady(self, jobs: list[_Job]) -> StateError:
        tags = sorted({job.segment.tag for job in jobs if job.todo.any()})
        message = f"tags {tags} are being written while their images are made; stop what writes, in a before_unmap hook"
        return StateError(message, state="resident", tags=tags)

    def _hash(self, job: _Job) -> Hashes:
        """Hashes on the device of the chunks that are to do; 0 elsewhere."""
        return self._hash_at(job.image, job.todo, job.segment.address, on_host=False)

    def _hash_image(self, job: _Job) -> Hashes:
        return self._hash_at(job.image, job.todo, self.address_of(job.segment), on_host=True)

    def _hash_at(self, image: Image, mask: Mask, base: int, on_host: bool) -> Hashes:
        out = np.zeros_like(image.hashes)
        for (start, stop), (offset, size) in zip(runs(mask), image.byte_runs(mask), strict=True):
            out[start:stop] = self._device.hash_chunks(
                base + offset, size, image.chunk_bytes, on_host=on_host, threads=self._threads
            )
        return out


def _parts(mask: Mask, most: int | None = None) -> Iterator[Mask]:
    """``mask`` in pieces of one stretch each, of at most so many chunks."""
    for start, stop in runs(mask):
        for first in range(start, stop, most or stop - start):
            part = np.zeros_like(mask)
            part[first : min(stop, first + (most or stop))] = True
            yield part


def _image_of(segment: Segment) -> Image:
    if segment.image is None:
        raise BugError(f"a region of tag {segment.tag!r} has no image", tag=segment.tag)
    return segment.image


def _missing_bytes(segment: Segment, chunk_bytes: int) -> int:
    live = segment.live(chunk_bytes)
    if segment.image is not None:
        live &= ~segment.image.committed
    return sum(size for _, size in byte_runs(live, chunk_bytes, segment.nbytes))
