"""Where images have their host memory from: one arena of address space, in which every image has its place for life, and memory
where it holds something, private or of files that others may have too.

Private memory may be taken ahead: before there are images, beside whatever else a start does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torpor._native import Arena, Device
from torpor.errors import BugError, HostMemoryError, TorporError
from torpor.memory.clock import Waits
from torpor.memory.config import PAGE_BYTES
from torpor.memory.image import Image, Lease, image_of, parts_of
from torpor.memory.layout import FreeList, Mask, byte_runs
from torpor.memory.procfs import host_memory_bytes
from torpor.memory.types import AheadReport

if TYPE_CHECKING:
    from torpor.memory.segment import Segment

COMMIT_CHUNKS = 128  # at a time: whoever waits for the first need not wait for all
AHEAD_THREADS = 4  # each lane's: more get in each other's way, and in that of whoever computes meanwhile


class Backing:
    """Of all images of one memory. Not thread-safe; called inside a transaction only."""

    def __init__(self, device: Device, chunk_bytes: int, limit_bytes: int | None, threads: int) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._limit_bytes = limit_bytes
        self._threads = threads
        self._arena: Arena | None = None
        self._space: FreeList | None = None
        self._leases: set[Lease] = set()
        self._scratch: list[Arena] = []  # more than one only where the driver did not let go
        self._ahead_bytes = 0  # asked for from the arena's begin on, until ``end_ahead``
        self.committed_bytes = 0
        self.waits = Waits()  # for host memory, by whoever needs it

    def close(self) -> None:
        """Idempotent. Every image is gone."""
        while self._scratch:
            self._scratch[-1].close()
            self._scratch.pop()
        if self._arena is not None:
            self._arena.close()
            self._arena = self._space = None
            self.committed_bytes = self._ahead_bytes = 0
            for lease in self._leases:
                os.close(lease.descriptor)
            self._leases.clear()

    def check(self, images: Sequence[Image]) -> None:
        """BugError when arena, images and count disagree."""
        if sum(i.committed_bytes for i in images) != self.committed_bytes:
            raise BugError(f"images count {self.committed_bytes} bytes of host memory, which is not their sum")
        if {x for i in images for x in i.leases} != self._leases:
            raise BugError("images have files that nobody counts")
        if self._space is not None:
            self._space.check()
            if sorted(o for o, _ in self._space.pieces) != sorted(i.offset for i in images):
                raise BugError("the arena hands out what no image has")

    # ---- addresses ---------------------------------------------------------------------------------------------------------

    def place_images(self, segments: Sequence[Segment]) -> None:
        """Addresses for images, without memory. HostMemoryError where the limit forbids them."""
        if self._limit_bytes is not None:
            self._require_limit(sum(self._missing_bytes(s) for s in segments))
        for segment in segments:
            if segment.image is None:
                segment.image = self._new_image(segment.nbytes)

    def address_of(self, image: Image) -> int:
        """Where it begins."""
        return self._arena_memory().address + image.offset

    def forget(self, segment: Segment) -> None:
        """Its image, which has no memory, has no addresses either any more."""
        image = image_of(segment)
        assert self._space is not None
        assert not image.committed.any()
        self._space.free(image.offset)
        segment.image = None

    def _new_image(self, nbytes: int) -> Image:
        if self._space is None:
            self._space = self._open_arena()
        offset = self._space.allocate(nbytes)
        if offset is None:
            raise HostMemoryError(f"no room for an image of {nbytes} bytes", bytes_needed=nbytes, bytes_free=0)
        return Image(offset, nbytes, self._chunk_bytes)

    def _open_arena(self) -> FreeList:
        """Address space only. Twice the machine's memory, so that holes between images never matter."""
        size = 2 * host_memory_bytes()
        self._arena = self._device.create_arena(size)
        return FreeList(size, PAGE_BYTES)

    def _arena_memory(self) -> Arena:
        assert self._arena is not None
        return self._arena

    # ---- private memory ----------------------------------------------------------------------------------------------------

    def provide(self, segments: Sequence[Segment]) -> None:
        """Memory for every live chunk of the segments' images, or HostMemoryError with nothing changed."""
        fresh = [segment for segment in segments if segment.image is None]
        committed: list[tuple[Segment, Mask]] = []
        with self.waits:
            try:
                self.place_images(segments)
                for segment in segments:
                    self.provide_in_parts(segment, lambda segment, part: committed.append((segment, part)))
            except BaseException:
                self.give_back(committed)
                for segment in fresh:
                    if segment.image is not None:
                        self.forget(segment)
                raise

    def provide_in_parts(self, segment: Segment, on_part: Callable[[Segment, Mask], None]) -> None:
        """Memory for every live chunk of an image that has its addresses. ``on_part`` hears, in the order of addresses, of every
        part that has it now. After an error those parts keep it: somebody may be using them."""
        image = image_of(segment)
        for part in parts_of(self.missing(segment), COMMIT_CHUNKS):
            [(offset, size)] = image.byte_runs(part)
            self._commit(image.offset + offset, size)
            image.committed |= part
            self.committed_bytes += size
            on_part(segment, part)

    def _commit(self, offset: int, size: int) -> None:
        self._end_ahead_at_limit(offset, size)
        try:
            self._arena_memory().commit(offset, size, self._threads)
        except TorporError:
            raise
        except BaseException:  # an interrupt is raised when the call is over: its memory would be nobody's
            self._arena_memory().decommit(offset, size)
            raise

    def give_back(self, parts: Iterable[tuple[Segment, Mask]]) -> None:
        for segment, part in parts:
            self.decommit(image_of(segment), part)

    def missing(self, segment: Segment) -> Mask:
        """Chunks that an image has to hold and has no memory for."""
        return segment.live(self._chunk_bytes) & ~image_of(segment).committed

    def decommit(self, image: Image, mask: Mask) -> None:
        """These chunks, which have memory, have none any more; files that none is left of are closed. After a DeviceError what is
        left of it is not believed, and a retry goes on."""
        image.valid &= ~mask
        for part in parts_of(mask):
            [(offset, size)] = image.byte_runs(part)
            try:
                self._arena_memory().decommit(image.offset + offset, size)
            except TorporError:
                raise
            except BaseException:  # an interrupt is raised when the call is over, or before it: once more does no harm
                self._arena_memory().decommit(image.offset + offset, size)
                self._count_out(image, part, size)
                raise
            self._count_out(image, part, size)
        for lease in [x for x in image.leases if not image.shared[x.start : x.stop].any()]:
            image.leases.remove(lease)
            self._leases.remove(lease)
            os.close(lease.descriptor)

    def _count_out(self, image: Image, part: Mask, size: int) -> None:
        image.committed &= ~part
        image.shared &= ~part
        self.committed_bytes -= size

    def _missing_bytes(self, segment: Segment) -> int:
        live = segment.live(self._chunk_bytes)
        if segment.image is not None:
            live &= ~segment.image.committed
        return sum(size for _, size in byte_runs(live, self._chunk_bytes, segment.nbytes))

    def _require_limit(self, needed: int) -> None:
        if self._limit_bytes is not None and self.committed_bytes + needed > self._limit_bytes:
            raise HostMemoryError(
                f"host images need {needed} bytes more; of host_limit_bytes={self._limit_bytes}, {self.committed_bytes} are used",
                bytes_needed=needed,
                bytes_free=max(0, self._limit_bytes - self.committed_bytes),
                setting="host_limit_bytes",
            )

    # ---- taken ahead -------------------------------------------------------------------------------------------------------

    def take_ahead(self, nbytes: int) -> None:
        """Host memory for images to come, so much in all, beside whatever goes on: the first images lie where it is. Does nothing
        where there are images, or were. HostMemoryError: nothing was begun."""
        self._require_limit(nbytes)
        if self._space is not None:
            return
        space = self._open_arena()
        try:
            if nbytes > space.nbytes:
                raise HostMemoryError(f"no room for {nbytes} bytes of images", bytes_needed=nbytes, bytes_free=0)
            self._arena_memory().commit_ahead(0, nbytes, COMMIT_CHUNKS * self._chunk_bytes, min(AHEAD_THREADS, self._threads))
            self._ahead_bytes = nbytes
        except BaseException:
            self._arena_memory().close()
            self._arena = None
            raise
        self._space = space

    def _end_ahead_at_limit(self, offset: int, size: int) -> None:
        """What is taken ahead counts: where memory that lies elsewhere would pass the limit together with it, it goes first."""
        if self._limit_bytes is None or not self._ahead_bytes or offset + size <= self._ahead_bytes:
            return
        found = self._arena_memory().ahead()  # first: what is taken meanwhile may count twice, never not at all
        to_come = found.asked_bytes - found.taken_bytes if found.active else 0
        if self.committed_bytes + size + self._device.stats().spare_bytes + to_come > self._limit_bytes:
            self.end_ahead()

    def end_ahead(self) -> AheadReport:
        """What no image has needed by now is given back."""
        if self._arena is None:
            return AheadReport(taken_bytes=0, seconds=0.0, unused_bytes=0, waited_s=self.waits.seconds)
        self._ahead_bytes = 0
        unused = self._arena.end_ahead()
        found = self._arena.ahead()
        return AheadReport(
            taken_bytes=found.taken_bytes,
            seconds=found.seconds,
            unused_bytes=unused,
            waited_s=self.waits.seconds,
            failure=found.failure,
        )

    # ---- memory of files ---------------------------------------------------------------------------------------------------

    def adopt(self, image: Image, mask: Mask, descriptor: int, file_offset: int) -> None:
        """These chunks have the memory of a sealed file, whose first byte is the image's byte ``file_offset``. DeviceError,
        HostMemoryError: none of them has memory."""
        self.decommit(image, mask & image.committed)
        try:
            for part in parts_of(mask):
                [(offset, size)] = image.byte_runs(part)
                place = image.offset + offset, size
                try:
                    self._arena_memory().adopt(*place, descriptor, offset - file_offset, self._threads)
                except BaseException:  # after an interrupt the file may be there, which nobody can write to
                    self._arena_memory().decommit(*place)
                    raise
                image.committed |= part
                self.committed_bytes += size
        except BaseException:
            self.decommit(image, mask & image.committed)
            raise

    def lease(self, image: Image, lease: Lease) -> None:
        """The file stays open until no chunk is left of it that is shared."""
        image.leases.append(lease)
        self._leases.add(lease)

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
