"""One image for all engines of a host that have the same content: pieces of images in memory files that everybody may read.

A piece is named by the hashes of its chunks, as they are on the device of whoever asks. One that is found is mapped and read:
only what has the hashes that the asker computed itself is believed (M4, M7). Nobody can write to it; content that changes makes
the piece private again (``ImageStore.save``). All of this goes on while the content is mapped and valid, so whatever fails here
costs an image, never a byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import struct
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from torpor._native import Device, buffer_at, host_free_bytes
from torpor.errors import ConfigurationError, DeviceError, HostMemoryError, StateError, TorporError
from torpor.memory.image import image_of
from torpor.memory.image_files import Found, Turn, find_files, make_file, open_found, seal_file, write_at
from torpor.memory.layout import Hashes, Mask
from torpor.memory.types import SharingReport

if TYPE_CHECKING:
    from torpor.memory.image import Image
    from torpor.memory.pool import Pool
    from torpor.memory.segment import Segment
    from torpor.memory.shared import Shared
    from torpor.memory.shared_images import SharedImages

PIECE_CHUNKS = 128  # 256 MiB of chunks of 2 MiB: what becomes private when one chunk of it changes
MOST_PIECES = 128  # per image: each needs a descriptor
WRITERS = 4
POLL_S = 0.05
PATIENCE_S = 30.0  # how long another engine may take for its next piece before we go on alone


@dataclass
class Piece:
    """Neighbouring chunks of one image."""

    segment: Segment
    image: Image
    start: int
    mask: Mask  # of the image's chunks: those of the piece that something lives in
    hashes: Hashes  # of the image's chunks, as the device has them now
    nbytes: int
    key: str

    @property
    def offset(self) -> int:
        """Where it begins in the image."""
        return self.start * self.image.chunk_bytes

    def parts(self) -> list[tuple[int, int]]:
        """(offset within the piece, bytes) of what lives."""
        return [(offset - self.offset, size) for offset, size in self.image.byte_runs(self.mask)]


@dataclass
class Outcome:
    found_bytes: int = 0
    made_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def share_pool(shared: Shared, pool: Pool) -> SharingReport:
    """Under the transaction's lock; the pool is resident and valid."""
    segments = [s for s in pool.mapped_segments() if not s.layout.empty]
    outcome = Sharing(shared.images.shared, shared.device, shared.threads).share(segments)
    live = sum(s.live_bytes(shared.config.chunk_bytes) for s in segments)
    shared_bytes = sum(s.shared_image_bytes for s in segments)
    return SharingReport(
        tag=pool.tag,
        shared_bytes=shared_bytes,
        found_bytes=outcome.found_bytes,
        made_bytes=outcome.made_bytes,
        private_bytes=live - shared_bytes,
        problems=tuple(dict.fromkeys(outcome.problems)),
    )


class Sharing:
    """One call of ``Memory.share_images``, under the transaction's lock."""

    def __init__(self, store: SharedImages, device: Device, threads: int) -> None:
        self._store = store
        self._device = device
        self._threads = threads
        self._outcome = Outcome()
        self._made: set[int] = set()  # descriptors of files that no image has taken yet
        self._ended = False

    def share(self, segments: Sequence[Segment]) -> Outcome:
        """Every piece of the segments' images that can be is shared when it returns; what cannot be shared stays as it was, or
        has no image. The segments: mapped, their content valid. Waits for another engine that is making the same files as long as
        that gets on."""
        try:
            self._store.begin(segments)
            self._share([piece for segment in segments for piece in self._pieces(segment)])
        except (OSError, HostMemoryError, DeviceError) as error:
            self._outcome.problems.append(str(error))
        return self._outcome

    def _pieces(self, segment: Segment) -> list[Piece]:
        """Those that are not shared yet."""
        image = image_of(segment)
        todo = segment.live(image.chunk_bytes) & ~image.shared
        found = self._store.hash_device(segment, todo)
        step = _piece_chunks(len(todo))
        pieces = []
        for start in range(0, len(todo), step):
            mask = np.zeros_like(todo)
            mask[start : start + step] = todo[start : start + step]
            if mask.any():
                nbytes = min(step * image.chunk_bytes, image.nbytes - start * image.chunk_bytes)
                key = _key_of(mask[start : start + step], found[start : start + step], nbytes, image.chunk_bytes)
                pieces.append(Piece(segment, image, start, mask, found, nbytes, key))
        return pieces

    def _share(self, pieces: list[Piece]) -> None:
        if not pieces:
            return None
        with contextlib.closing(Turn(_key_of_all(pieces))) as turn:
            given_up_at = time.monotonic() + PATIENCE_S
            while pieces:
                ours = turn.take()  # before looking: what the one before us has made is seen then
                left = self._attach_all(pieces)
                if len(left) < len(pieces):
                    given_up_at = time.monotonic() + PATIENCE_S
                pieces = left
                if ours:
                    return self._make_all(pieces)
                if time.monotonic() > given_up_at:
                    self._outcome.problems.append(f"another engine has been making them for {PATIENCE_S:.0f} s")
                    return None
                if pieces:
                    time.sleep(POLL_S)
        return None

    # ---- found --------------------------------------------------------------------------------------------------------------

    def _attach_all(self, pieces: list[Piece]) -> list[Piece]:
        """What is left."""
        found = find_files({piece.key for piece in pieces}) if pieces else {}
        return [piece for piece in pieces if not self._attach(piece, found.get(piece.key, []))]

    def _attach(self, piece: Piece, candidates: Sequence[Found]) -> bool:
        for candidate in candidates:
            descriptor = open_found(candidate, piece.nbytes)
            if descriptor is not None and self._adopt(piece, descriptor):
                self._outcome.found_bytes += piece.image.bytes_in(piece.mask)
                return True
        return False

    def _adopt(self, piece: Piece, descriptor: int) -> bool:
        """The image has this file's bytes where the piece is, if they are right. The descriptor is the image's, or closed."""
        try:
            self._store.adopt(piece, descriptor)
        except (DeviceError, HostMemoryError, ConfigurationError) as error:
            os.close(descriptor)
            self._outcome.problems.append(str(error))
            return False
        except BaseException:
            os.close(descriptor)
            raise
        return True

    # ---- made ---------------------------------------------------------------------------------------------------------------

    def _make_all(self, pieces: Sequence[Piece]) -> None:
        if not pieces:
            return
        _require_memory(sum(piece.image.bytes_in(piece.mask) for piece in pieces))
        lanes = min(WRITERS, len(pieces))
        size = max(piece.nbytes for piece in pieces)
        with self._store.scratch(lanes * size) as address, ThreadPoolExecutor(lanes, "torpor-share") as pool:
            slots: queue.SimpleQueue[int] = queue.SimpleQueue()
            for lane in range(lanes):
                slots.put(address + lane * size)
            jobs = deque[tuple[Piece, Future[int]]]()
            try:
                for piece in pieces:
                    jobs.append((piece, pool.submit(self._make, piece, slots)))  # those are cancelled by an interrupt
                while jobs:
                    self._take_made(*jobs.popleft())
            finally:
                for _, job in jobs:
                    job.cancel()
                self._end_making(slots, lanes)

    def _end_making(self, slots: queue.SimpleQueue[int], lanes: int) -> None:
        """Nobody makes any more, not even a thread that an interrupt of its start has left to itself. Files that no image took
        are closed."""
        self._ended = True
        taken = [slots.get() for _ in range(lanes)]
        for slot in taken:  # whoever comes now sees that it has ended
            slots.put(slot)
        while self._made:
            os.close(self._made.pop())

    def _take_made(self, piece: Piece, job: Future[int]) -> None:
        try:
            descriptor = job.result()
        except (OSError, TorporError) as error:
            del job  # it holds the error, and the error this frame
            self._outcome.problems.append(str(error))
            return
        self._made.discard(descriptor)
        if self._adopt(piece, descriptor):
            self._outcome.made_bytes += piece.image.bytes_in(piece.mask)

    def _make(self, piece: Piece, slots: queue.SimpleQueue[int]) -> int:
        """On a thread of its own: from the device by way of host memory into a file. Nobody takes it for right yet."""
        slot = slots.get()
        try:
            if self._ended:
                raise StateError("sharing has ended", state="closed")
            spans = [(slot + offset, piece.segment.address + piece.offset + offset, size) for offset, size in piece.parts()]
            self._device.copy("to_host", spans, threads=max(1, self._threads // WRITERS))
            descriptor = make_file(piece.key, piece.nbytes)
            try:
                for offset, size in piece.parts():
                    write_at(descriptor, memoryview(buffer_at(slot + offset, size)).cast("B"), offset)
                sealed = seal_file(descriptor)
                self._made.add(sealed)
                return sealed
            finally:
                os.close(descriptor)
        finally:
            slots.put(slot)


def _require_memory(nbytes: int) -> None:
    free = host_free_bytes()
    if nbytes > free:
        message = f"shared images need {nbytes} bytes of host memory, {free} are free"
        raise HostMemoryError(message, bytes_needed=nbytes, bytes_free=free)


def _piece_chunks(count: int) -> int:
    step = PIECE_CHUNKS
    while -(-count // step) > MOST_PIECES:
        step *= 2
    return step


def _key_of(mask: Mask, hashes: Hashes, nbytes: int, chunk_bytes: int) -> str:
    """Two pieces have one name if they have the same bytes where something lives, in the same chunks, and no other."""
    told = hashlib.sha256(struct.pack("<3Q", 1, nbytes, chunk_bytes))
    told.update(np.packbits(mask).tobytes())
    told.update(hashes[mask].astype("<u8").tobytes())
    return told.hexdigest()[:40]


def _key_of_all(pieces: Sequence[Piece]) -> str:
    return hashlib.sha256("".join(piece.key for piece in pieces).encode()).hexdigest()[:40]
