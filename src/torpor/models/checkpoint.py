"""A folder's safetensors files: what is in them, and reading tensors straight into memory that is already there.

Reads are plain preads: a damaged or truncated file is a ModelError that names it, never a fault on a mapped page.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torpor.errors import ModelError
from torpor.memory.futures import result_of
from torpor.memory.segment import ALIGN_BYTES
from torpor.models.checkpoint_files import (
    CHUNK_BYTES,
    MAX_READERS,
    TensorEntry,
    find_files,
    hash_files,
    open_file,
    read_header,
    sign_files,
)
from torpor.models.device_reads import DeviceRead, read_to_device
from torpor.models.file_errors import naming
from torpor.models.fill_steps import NO_STEPS, FillSteps
from torpor.models.hardware import usable_cores

_SMALL = 1 << 20  # parameters
_PART_BYTES = 32 << 20  # of one tensor, read by one thread


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder's safetensors files."""

    files: tuple[Path, ...]
    entries: Mapping[str, TensorEntry] = field(repr=False)
    signature: tuple[tuple[int, int, int], ...]  # size, mtime, inode per file: a cheap sign that nobody wrote to them

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that most of the bytes have."""
        totals: dict[torch.dtype, int] = {}
        for entry in self.entries.values():
            if entry.dtype.is_floating_point:
                totals[entry.dtype] = totals.get(entry.dtype, 0) + entry.nbytes
        return max(totals, key=lambda dtype: totals[dtype], default=torch.float32)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    def bytes_in_pool(self, dtype: torch.dtype) -> int:
        """What all of its tensors take there, floating-point ones in ``dtype``."""
        kinds = [(e, dtype if e.dtype.is_floating_point else e.dtype) for e in self.entries.values()]
        return sum(-(-math.prod(e.shape) * kind.itemsize // ALIGN_BYTES) * ALIGN_BYTES for e, kind in kinds)

    def digest(self) -> str:
        """Hash of every byte of every file: changes when any weight does. Reads all files, several chunks at a time."""
        return hash_files(self.files)

    def same_values(self, first: str, second: str, dtype: torch.dtype) -> bool:
        """Whether two tensors are equal once they are ``dtype``. Reads both, a piece at a time. ModelError for a failing disk."""
        one, other = self.entries[first], self.entries[second]
        if one.shape != other.shape:
            return False
        total = math.prod(one.shape)
        step = CHUNK_BYTES // max(one.dtype.itemsize, other.dtype.itemsize)
        with contextlib.ExitStack() as stack:
            files = []
            for entry in (one, other):
                files.append(open_file(entry.file))
                stack.callback(os.close, files[-1])
            for at in range(0, total, step):
                count = min(step, total - at)
                values = [_read_values(fd, e, at, count).to(dtype) for fd, e in zip(files, (one, other), strict=True)]
                if not torch.equal(*values):
                    return False
        return True

    def read_into(self, targets: Mapping[str, torch.Tensor], steps: FillSteps = NO_STEPS) -> None:
        """Fill ``targets`` (same shapes; dtypes are converted) from the entries of the same names, in the order of their
        addresses. ModelError when a file falls short."""
        for name, target in targets.items():
            _check_shape(self.entries[name], target)
        descriptors = {file: open_file(file) for file in self.files}
        try:
            on_gpu = {name: target for name, target in targets.items() if target.is_cuda and target.is_contiguous()}
            for name in on_gpu:
                steps.before(name)
            read_to_device([_device_read(descriptors, self.entries[n], t) for n, t in on_gpu.items()], usable_cores())
            for name in on_gpu:
                steps.after(name)
            self._read_on_host({n: t for n, t in targets.items() if n not in on_gpu}, descriptors, steps)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _read_on_host(self, targets: Mapping[str, torch.Tensor], descriptors: Mapping[Path, int], steps: FillSteps) -> None:
        with ThreadPoolExecutor(min(MAX_READERS, usable_cores())) as pool:
            jobs: deque[Future[None]] = deque()
            for name, target in sorted(targets.items(), key=lambda item: item[1].data_ptr()):
                entry = self.entries[name]
                parts = _parts_of(entry, target)
                progress = _Progress(name, len(parts), steps)
                jobs += [pool.submit(_read_part, descriptors[entry.file], entry, part, progress) for part in parts]
            try:
                while jobs:
                    result_of(jobs.popleft())
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads and checks the headers only. ModelError names the file and what is wrong with it."""
    with naming(folder):
        files = find_files(folder)
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise ModelError(f"{file}: tensor {name!r} is also in {entries[name].file.name}", path=str(file))
            entries[name] = entry
    return Checkpoint(files, entries, sign_files(files))


def check_size(model: Any, num_stored: int, path: Path) -> None:
    """ModelError when the configuration describes a model far larger than its weights are, before there is memory for one.
    Smaller differences are found, and told by name, when the weights are read."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > 2 * num_stored + _SMALL:
        raise ModelError(
            f"{path}: the configuration describes a model of {parameters} parameters, the weights are {num_stored}",
            path=str(path),
        )


def _read_values(descriptor: int, entry: TensorEntry, start: int, count: int) -> torch.Tensor:
    """``count`` elements from number ``start`` on."""
    values = torch.empty(count, dtype=entry.dtype)
    _read_whole(descriptor, entry, start * entry.dtype.itemsize, values)
    return values


def _check_shape(entry: TensorEntry, target: torch.Tensor) -> None:
    if tuple(target.shape) != entry.shape:
        raise ModelError(f"{entry.file}: shape {list(entry.shape)} where {list(target.shape)} is needed", path=str(entry.file))


def _device_read(descriptors: Mapping[Path, int], entry: TensorEntry, target: torch.Tensor) -> DeviceRead:
    return DeviceRead(descriptors[entry.file], str(entry.file), entry.offset, entry.nbytes, entry.dtype, target)


class _Progress:
    """Tells the steps of one tensor that several threads read."""

    def __init__(self, name: str, parts: int, steps: FillSteps) -> None:
        self._name = name
        self._left = parts
        self._steps = steps
        self._lock = threading.Lock()

    def begin(self) -> None:
        self._steps.before(self._name)

    def end(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._steps.after(self._name)


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of an entry from ``start`` on, into ``target`` of its own."""

    start: int
    target: torch.Tensor


def _parts_of(entry: TensorEntry, target: torch.Tensor) -> list[_Part]:
    """Pieces that can be read at once; one where a conversion is between file and target."""
    if target.device.type != "cpu" or target.dtype != entry.dtype or not target.is_contiguous() or not entry.nbytes:
        return [_Part(0, target)]
    size = entry.dtype.itemsize
    pieces = torch.split(target.detach().reshape(-1), _PART_BYTES // size)
    return [_Part(i * (_PART_BYTES // size) * size, piece) for i, piece in enumerate(pieces)]


def _read_part(descriptor: int, entry: TensorEntry, part: _Part, progress: _Progress) -> None:
    progress.begin()
    direct = part.target.device.type == "cpu" and part.target.dtype == entry.dtype and part.target.is_contiguous()
    landing = part.target if direct else torch.empty(entry.shape, dtype=entry.dtype)
    _read_whole(descriptor, entry, part.start, landing)
    if not direct:
        part.target.copy_(landing)
    progress.end()


def _read_whole(descriptor: int, entry: TensorEntry, start: int, landing: torch.Tensor) -> None:
    """Fill ``landing``, contiguous and on the host, with the entry's bytes from ``start`` on."""
    buffer = landing.detach().reshape(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(buffer):
        at = entry.offset + start + done
        with naming(entry.file):
            count = os.preadv(descriptor, [buffer[done:]], at)
        if count == 0:
            raise ModelError(f"{entry.file}: ends at byte {at}, within a tensor", path=str(entry.file))
        done += count
