"""Host images: the content of sleeping regions in host memory, copied to and fro by chunks, proved by their hashes (M4, M7)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from torpor._native import ChunkImage, Device
from torpor.errors import BugError, DeviceError, StateError
from torpor.memory.backing import Backing
from torpor.memory.clock import Phases
from torpor.memory.futures import result_of
from torpor.memory.image import ChunkHasher, image_of
from torpor.memory.layout import Hashes, Mask
from torpor.memory.shared_images import SharedImages

if TYPE_CHECKING:
    from torpor.memory.segment import Segment

COPY_ROUNDS = 3  # how often a chunk that changes under the copy is tried


class _Job:
    """What one segment needs of a save or a restore."""

    def __init__(self, segment: Segment, live: Mask) -> None:
        self.segment = segment
        self.image = image_of(segment)
        self.live = live
        self.todo: Mask = self.live.copy()
        self.copied_bytes = 0
        self.source: Hashes = np.zeros_like(self.image.hashes)
        self.checked: Hashes = np.zeros_like(self.image.hashes)

    def for_device(self, host_address: int) -> ChunkImage:
        image = self.image
        return ChunkImage(
            device_address=self.segment.address,
            host_address=host_address,
            nbytes=image.nbytes,
            wanted=self.todo,
            valid=image.valid,
            known=image.hashes,
            source=self.source,
            checked=self.checked,
        )


class ImageStore:
    """All images of one memory. Not thread-safe; called inside a transaction only."""

    def __init__(self, device: Device, backing: Backing, chunk_bytes: int, threads: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._threads = threads
        self._backing = backing
        self._hasher = ChunkHasher(device, threads)
        self.shared = SharedImages(device, backing, self._hasher)

    def save(self, segments: Sequence[Segment], phases: Phases, only: Mapping[Segment, Mask] | None = None) -> dict[Segment, int]:
        """Brings the images of mapped segments up to date; gives back the bytes copied for each (M7).

        Returns with every live chunk valid (of those in ``only``, if given), checked by hash (M4). HostMemoryError: no image has
        more memory than before, and what was valid, private and unchanged still is. StateError when somebody keeps writing
        meanwhile.
        """
        wanted = {s: s.live(self._chunk_bytes) if only is None else only[s] for s in segments}
        with phases("save"):
            kept = self.shared.keep(wanted)
        with phases("commit"):
            self._backing.provide(segments)
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
            image_of(segment).valid &= ~mask

    def load(self, chunks: Mapping[Segment, Mask]) -> None:
        """Copies these chunks of images to their mapped segments, checks what arrived, and believes them from then on. The
        images' own hashes are computed beside the copies. DeviceError when something else arrived."""
        jobs = [_Job(s, mask) for s, mask in chunks.items()]
        with ThreadPoolExecutor(1) as beside:
            hashes = deque(beside.submit(self._hash_image, job) for job in jobs)
            self._device.restore_chunks(self._for_device(jobs), self._chunk_bytes, threads=self._threads)
        for job in jobs:
            job.image.hashes[job.live] = result_of(hashes.popleft())[job.live]
            self._require_arrived(job, "what was loaded; load it again")
        for job in jobs:
            job.image.valid |= job.live

    # ---- given back ---------------------------------------------------------------------------------------------------------

    def release(self, segment: Segment) -> None:
        """Gives the segment's image back. After a DeviceError what is left of it is not believed, and a retry goes on."""
        image = segment.image
        if image is not None:
            self._backing.decommit(image, image.committed.copy())
            self._backing.forget(segment)

    def trim(self, segment: Segment) -> None:
        """Gives back the chunks of the image that no tensor lies in any more."""
        image = segment.image
        if image is not None:
            self._backing.decommit(image, image.committed & ~segment.live(image.chunk_bytes))

    def check(self, segments: Iterable[Segment]) -> None:
        """BugError when what images say of themselves, their memory and its count disagree."""
        images = [s.image for s in segments if s.image is not None]
        self._backing.check(images)
        if any((i.valid & ~i.committed).any() for i in images):
            raise BugError("an image is believed where it has no memory")
        if any((i.shared & ~i.valid).any() for i in images):
            raise BugError("an image has shared chunks that are not right")

    # ---- bytes -------------------------------------------------------------------------------------------------------------

    def _save(self, jobs: Sequence[_Job]) -> None:
        """One round: copies chunks whose image is not right, and believes those whose copy has the hash of the source; the rest
        stays to do. DeviceError when a copy is wrong and its source did not change."""
        before = [(job.image.valid.copy(), job.image.hashes.copy()) for job in jobs]
        self._device.save_chunks(self._for_device(jobs), self._chunk_bytes, threads=self._threads)
        for job, (was_valid, known) in zip(jobs, before, strict=True):
            self._believe(job, was_valid & (known == job.source))
        for job in jobs:
            if job.todo.any() and (self._hasher.on_device(job.segment, job.todo) == job.source)[job.todo].any():
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
        return [job.for_device(self._backing.address_of(job.image)) for job in jobs if job.todo.any()]

    def _unsteady(self, jobs: list[_Job]) -> StateError:
        tags = sorted({job.segment.tag for job in jobs if job.todo.any()})
        message = f"tags {tags} are being written while their images are made; stop what writes, in a before_unmap hook"
        return StateError(message, state="resident", tags=tags)

    def _hash_image(self, job: _Job) -> Hashes:
        return self._hasher.on_host(job.image, job.todo, self._backing.address_of(job.image))
