"""Host images: the content of sleeping regions in one arena of host memory, by chunks, each with the hash that proves it.

A chunk of an image is believed only while its flag says so. It is cleared before the chunk is overwritten and set after the bytes
were read back and hashed, so a copy that fails half way leaves no chunk in doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
        self.committed_bytes = 0

    def save(self, segments: Sequence[Segment], phases: Phases, only: Mapping[Segment, Mask] | None = None) -> dict[Segment, int]:
        """Brings the images of mapped segments up to date; gives back the bytes copied for each (M7).

        Returns with every live chunk valid (of those in ``only``, if given), checked by hash (M4). HostMemoryError: no image has
        more memory than before, and what was valid and unchanged still is. StateError when somebody keeps writing meanwhile.
        """
        with phases("commit"):
            self.provide(segments)
        jobs = [_Job(s, s.live(self._chunk_bytes) if only is None else only[s]) for s in segments]
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

    def address_of(self, segment: Segment) -> int:
        """Where the image of a region begins. BugError when it has none."""
        return self._arena_memory().address + _image_of(segment).offset

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
        return self._hash_at(job, job.segment.address, on_host=False)

    def _hash_image(self, job: _Job) -> Hashes:
        return self._hash_at(job, self.address_of(job.segment), on_host=True)

    def _hash_at(self, job: _Job, base: int, on_host: bool) -> Hashes:
        image, out = job.image, np.zeros_like(job.image.hashes)
        for (start, stop), (offset, size) in zip(runs(job.todo), image.byte_runs(job.todo), strict=True):
            out[start:stop] = self._device.hash_chunks(
                base + offset, size, image.chunk_bytes, on_host=on_host, threads=self._threads
            )
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
