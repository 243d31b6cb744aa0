"""Host images: the content of sleeping regions in one arena of host memory, by chunks, each with the hash that proves it.

A chunk of an image is believed only while its flag says so. It is cleared before the chunk is overwritten and set after the bytes
were read back and hashed, so a copy that fails half way leaves no chunk in doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torpor._native import Arena, Device
from torpor.errors import BugError, DeviceError, HostMemoryError, StateError
from torpor.memory.clock import Phases
from torpor.memory.config import PAGE_BYTES
from torpor.memory.layout import FreeList, Hashes, Mask, byte_runs, chunk_count, runs
from torpor.memory.procfs import host_memory_bytes

if TYPE_CHECKING:
    from torpor.memory.segment import Segment

COPY_ROUNDS = 3  # how often a chunk that changes under the copy is tried


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

    def byte_runs(self, mask: Mask) -> list[tuple[int, int]]:
        return byte_runs(mask, self.chunk_bytes, self.nbytes)

    def bytes_in(self, mask: Mask) -> int:
        return sum(size for _, size in self.byte_runs(mask))

    @property
    def committed_bytes(self) -> int:
        return self.bytes_in(self.committed)


class _Job:
    """What one segment needs of a save."""

    def __init__(self, segment: Segment, image: Image) -> None:
        self.segment = segment
        self.image = image
        self.live = segment.live(image.chunk_bytes)
        self.todo: Mask = self.live.copy()
        self.copied_bytes = 0


class ImageStore:
    """All images of one memory. Not thread-safe; called inside a transaction only."""

    def __init__(self, device: Device, chunk_bytes: int, limit_bytes: int | None, threads: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._limit_bytes = limit_bytes
        self._threads = threads
        self._arena: Arena | None = None
        self._space: FreeList | None = None
        self.committed_bytes = 0

    def save(self, segments: Sequence[Segment], phases: Phases) -> dict[Segment, int]:
        """Brings the images of mapped segments up to date; gives back the bytes copied for each (M7).

        Returns with every live chunk valid, checked by hash (M4). HostMemoryError: no image has more memory than before, and
        what was valid and unchanged still is. StateError when somebody keeps writing while it copies.
        """
        with phases("commit"):
            self.provide(segments)
        jobs = [_Job(s, _image_of(s)) for s in segments]
        for _ in range(COPY_ROUNDS):
            with phases("save"):
                for job in jobs:
                    self._save(job)
            if not any(job.todo.any() for job in jobs):
                break
        else:
            raise self._unsteady(jobs)
        for job in jobs:
            self._decommit(job.image, job.image.committed & ~job.live)
        return {job.segment: job.copied_bytes for job in jobs}

    def restore(self, segments: Iterable[Segment], phases: Phases) -> dict[Segment, int]:
        """Copies images into their mapped segments and checks what arrived; gives back the bytes. The images stay as they are."""
        todo = [(s, s.live(self._chunk_bytes)) for s in segments]
        todo = [(s, live) for s, live in todo if live.any()]
        for segment, live in todo:
            if not _image_of(segment).valid[live].all():
                raise BugError(f"the image of a region of tag {segment.tag!r} is not complete", tag=segment.tag)
        with phases("restore"):
            for segment, live in todo:
                self._restore(segment, live)
        return {s: _image_of(s).bytes_in(live) for s, live in todo}

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
        if self._arena is not None:
            self._arena.close()
            self._arena = self._space = None
            self.committed_bytes = 0

    def check(self, segments: Iterable[Segment]) -> None:
        """BugError when arena, images and count disagree."""
        images = [s.image for s in segments if s.image is not None]
        if sum(i.committed_bytes for i in images) != self.committed_bytes:
            raise BugError(f"images count {self.committed_bytes} bytes of host memory, which is not their sum")
        if any((i.valid & ~i.committed).any() for i in images):
            raise BugError("an image is believed where it has no memory")
        if self._space is not None:
            self._space.check()
            if sorted(o for o, _ in self._space.pieces) != sorted(i.offset for i in images):
                raise BugError("the arena hands out what no image has")

    # ---- memory ------------------------------------------------------------------------------------------------------------

    def provide(self, segments: Sequence[Segment]) -> None:
        """Memory for every live chunk of the segments' images, or HostMemoryError with nothing changed."""
        self._require_room(segments)
        made: list[Segment] = []
        committed: list[tuple[Image, Mask]] = []
        try:
            for segment in segments:
                if segment.image is None:
                    segment.image = Image(self._place(segment.nbytes), segment.nbytes, self._chunk_bytes)
                    made.append(segment)
                image = segment.image
                for part in _parts(segment.live(self._chunk_bytes) & ~image.committed):
                    self._commit(image, part)
                    committed.append((image, part))
        except BaseException:
            for image, part in committed:
                self._decommit(image, part)
            for segment in made:
                self.release(segment)
            raise

    def _require_room(self, segments: Sequence[Segment]) -> None:
        needed = sum(_missing_bytes(s, self._chunk_bytes) for s in segments)
        if self._limit_bytes is not None and self.committed_bytes + needed > self._limit_bytes:
            raise HostMemoryError(
                f"host images need {needed} bytes more; of host_limit_bytes={self._limit_bytes}, {self.committed_bytes} are used",
                bytes_needed=needed,
                bytes_free=max(0, self._limit_bytes - self.committed_bytes),
                setting="host_limit_bytes",
            )

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
            self.committed_bytes -= size

    def _arena_space(self) -> FreeList:
        assert self._space is not None
        return self._space

    def _arena_memory(self) -> Arena:
        assert self._arena is not None
        return self._arena

    # ---- bytes -------------------------------------------------------------------------------------------------------------

    def _save(self, job: _Job) -> None:
        """One round: copies chunks whose image is not right, and believes those whose copy has the hash of the source; the rest
        stays to do. DeviceError when a copy is wrong and its source did not change."""
        image = job.image
        was_valid, known = image.valid.copy(), image.hashes.copy()
        source, copied = self._device.save_chunks(
            *self._place_of(job.segment), wanted=job.todo, valid=image.valid, known=image.hashes, threads=self._threads
        )
        dirty = job.todo & ~image.valid
        job.copied_bytes += image.bytes_in(dirty & ~(was_valid & (known == source)))
        right = dirty & (copied == source)
        image.hashes[right] = source[right]
        image.valid |= right
        job.todo = dirty & ~right
        if job.todo.any() and (self._hash(job.segment.address, image, job.todo) == source)[job.todo].any():
            raise DeviceError(f"copying tag {job.segment.tag!r} to the host changed its bytes", operation="copy", code=0)

    def _restore(self, segment: Segment, live: Mask) -> None:
        arrived = self._device.restore_chunks(*self._place_of(segment), wanted=live, threads=self._threads)
        self._require_equal(segment, arrived, live)

    def _place_of(self, segment: Segment) -> tuple[int, int, int, int]:
        """Addresses of the region and of its image, bytes of both, bytes of a chunk."""
        image = _image_of(segment)
        return segment.address, self._arena_memory().address + image.offset, image.nbytes, image.chunk_bytes

    def _unsteady(self, jobs: list[_Job]) -> StateError:
        tags = sorted({job.segment.tag for job in jobs if job.todo.any()})
        message = f"tags {tags} are being written while their images are made; stop what writes, in a before_unmap hook"
        return StateError(message, state="resident", tags=tags)

    def _require_equal(self, segment: Segment, found: Hashes, live: Mask) -> None:
        wrong = int((found != _image_of(segment).hashes)[live].sum())
        if wrong:
            message = f"{wrong} chunks of tag {segment.tag!r} are not what was put to sleep; discard the tag and fill it anew"
            raise DeviceError(message, operation="restore", code=0, tag=segment.tag, chunks=wrong)

    def _hash(self, address: int, image: Image, mask: Mask) -> Hashes:
        """Hashes of the chunks in ``mask``; 0 elsewhere."""
        out = np.zeros_like(image.hashes)
        for (start, stop), (offset, size) in zip(runs(mask), image.byte_runs(mask), strict=True):
            out[start:stop] = self._device.hash_chunks(address + offset, size, image.chunk_bytes, threads=self._threads)
        return out


def _parts(mask: Mask) -> Iterator[Mask]:
    """``mask`` in pieces of one stretch each."""
    for start, stop in runs(mask):
        part = np.zeros_like(mask)
        part[start:stop] = True
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
