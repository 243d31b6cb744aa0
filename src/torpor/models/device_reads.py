"""Reading tensors from files into a GPU's memory: several readers, each with two page-locked buffers, one of which is read into
while the other is on its way to the device."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from torpor.errors import ModelError
from torpor.memory.futures import result_of
from torpor.models.file_errors import naming

PIECE_BYTES = 8 << 20  # page-locking costs time too: 8 readers with two of these are 128 MiB
_MAX_READERS = 8


@dataclass(frozen=True, slots=True)
class DeviceRead:
    """``nbytes`` at ``offset`` of a file into ``target``, converted from ``dtype`` where it has another."""

    descriptor: int
    name: str  # of the file, for errors
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: torch.Tensor  # contiguous, on a GPU


def read_to_device(reads: Sequence[DeviceRead], readers: int) -> None:
    """Blocks until everything is there. ModelError for a file that ends too early; some targets are written then."""
    pieces = deque(piece for read in reads for piece in _pieces(read))
    if not pieces:
        return
    count = max(1, min(readers, _MAX_READERS, len(pieces)))
    device = pieces[0].target.device
    torch.cuda.current_stream(device).synchronize()  # what was queued on the targets before comes before
    with ThreadPoolExecutor(count, thread_name_prefix="torpor-read") as pool:
        jobs = deque(pool.submit(_Lane(device).drain, pieces) for _ in range(count))
        while jobs:
            result_of(jobs.popleft())


def _pieces(read: DeviceRead) -> list[DeviceRead]:
    """Of at most PIECE_BYTES."""
    flat = read.target.detach().reshape(-1)
    size = read.dtype.itemsize
    step = PIECE_BYTES // size * size
    return [
        DeviceRead(
            read.descriptor,
            read.name,
            read.offset + at,
            min(step, read.nbytes - at),
            read.dtype,
            flat[at // size : min(at + step, read.nbytes) // size],
        )
        for at in range(0, read.nbytes, step)
    ]


class _Lane:
    """One reader's buffers and stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent: list[Any] = [None, None]  # events: the buffer's last copy is done

    def drain(self, pieces: deque[DeviceRead]) -> None:
        """Take pieces until there are none; other lanes take from the same."""
        turn = 0
        with torch.cuda.stream(self._stream):
            while True:
                try:
                    piece = pieces.popleft()
                except IndexError:
                    break
                self._move(piece, turn)
                turn = 1 - turn
        self._stream.synchronize()

    def _move(self, piece: DeviceRead, turn: int) -> None:
        buffer = self._buffers[turn][: piece.nbytes]
        if self._sent[turn] is not None:
            self._sent[turn].synchronize()
        _read_whole(piece, buffer)
        values = buffer.view(piece.dtype)
        if piece.dtype != piece.target.dtype:
            values = values.to(self._device, non_blocking=True)
        piece.target.copy_(values, non_blocking=True)
        event = self._sent[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)


def _read_whole(piece: DeviceRead, buffer: torch.Tensor) -> None:
    view = buffer.numpy().data
    done = 0
    while done < piece.nbytes:
        with naming(piece.name):
            count = os.preadv(piece.descriptor, [view[done:]], piece.offset + done)
        if count == 0:
            raise ModelError(f"{piece.name}: ends at byte {piece.offset + done}, within a tensor", path=piece.name)
        done += count
