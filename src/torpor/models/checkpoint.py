"""Safetensors files: what is in them, their content's identity, and reading tensors straight into memory that is already there.

Headers are checked against the file before anything is read, and reads are plain preads: a damaged or truncated file is a
ModelError that names it, never a fault on a mapped page.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torpor.errors import ModelError
from torpor.memory.segment import ALIGN_BYTES
from torpor.models.device_reads import DeviceRead, read_to_device
from torpor.models.file_errors import naming
from torpor.models.fill_steps import NO_STEPS, FillSteps
from torpor.models.hardware import usable_cores

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_NAME = 255  # of a file
_MAX_DIMS = 16
_SMALL = 1 << 20  # parameters
_CHUNK_BYTES = 16 << 20
_PART_BYTES = 32 << 20  # of one tensor, read by one thread
_MAX_READERS = 8

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    file: Path
    offset: int  # from the start of the file
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


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
        step = _CHUNK_BYTES // max(one.dtype.itemsize, other.dtype.itemsize)
        with contextlib.ExitStack() as stack:
            files = []
            for entry in (one, other):
                files.append(_open(entry.file))
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
        descriptors = {file: _open(file) for file in self.files}
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
        with ThreadPoolExecutor(min(_MAX_READERS, usable_cores())) as pool:
            jobs = []
            for name, target in sorted(targets.items(), key=lambda item: item[1].data_ptr()):
                entry = self.entries[name]
                parts = _parts_of(entry, target)
                progress = _Progress(name, len(parts), steps)
                jobs += [pool.submit(_read_part, descriptors[entry.file], entry, part, progress) for part in parts]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads and checks the headers only. ModelError names the file and what is wrong with it."""
    with naming(folder):
        files = _find_files(folder)
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in _read_header(file).items():
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


def sign_files(files: Iterable[Path]) -> tuple[tuple[int, int, int], ...]:
    try:
        return tuple((s.st_size, s.st_mtime_ns, s.st_ino) for s in (file.stat() for file in files))
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}", path=str(error.filename)) from error


def hash_files(files: Iterable[Path]) -> str:
    """32 hex digits over the content of ``files`` in order; chunks are hashed in parallel, then their hashes."""
    total = hashlib.sha256()
    with ThreadPoolExecutor(min(_MAX_READERS, usable_cores())) as pool:
        for file in files:
            descriptor = _open(file)
            try:
                size = os.fstat(descriptor).st_size
                total.update(struct.pack("<Q", size))
                offsets = range(0, size, _CHUNK_BYTES)
                with naming(file):
                    for part in pool.map(lambda offset, fd=descriptor: _hash_chunk(fd, offset), offsets):
                        total.update(part)
            finally:
                os.close(descriptor)
    return total.hexdigest()[:32]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or ModelError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}", path=str(path)) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: a JSON object was expected, not {type(data).__name__}", path=str(path))
    return data


def _find_files(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX_NAME
    if index.exists():
        return _indexed_files(folder, index)
    single = folder / "model.safetensors"
    if single.exists():
        return (single,)
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    hint = f"; it has {', '.join(others[:5])}" if others else ""
    raise ModelError(
        f"{folder}: no model.safetensors and no {INDEX_NAME}{hint}. Weights are read from safetensors only "
        "(load_format='random' needs none)",
        path=str(folder),
    )


def _indexed_files(folder: Path, index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map", path=str(index))
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not name or len(name) > _MAX_NAME or Path(name).name != name:
            raise ModelError(f"{index}: names the file {name[:_MAX_NAME]!r}, which is not in its own folder", path=str(index))
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: missing; {INDEX_NAME} names it", path=str(folder / name))
    return tuple(folder / name for name in names)


def _read_header(file: Path) -> dict[str, TensorEntry]:
    try:
        return _parse_header(file)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}", path=str(file)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file}: damaged safetensors header: {error}", path=str(file)) from error


def _parse_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{file}: not a safetensors file, or truncated within its header ({size} bytes)", path=str(file))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(file, 8 + length, name, raw) for name, raw in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda e: e.offset):
        if entry.offset != end:
            raise ValueError(f"data at {entry.offset} overlaps or leaves a hole after {end}")
        end += entry.nbytes
    if end != size:
        state = "truncated" if size < end else "longer than its header says"
        raise ModelError(f"{file}: {state}: the header describes {end} bytes, the file has {size}", path=str(file))
    return entries


def _parse_entry(file: Path, base: int, name: str, raw: dict[str, Any]) -> TensorEntry:
    dtype = _DTYPES.get(raw["dtype"])
    if dtype is None:
        raise ModelError(f"{file}: tensor {name!r} has dtype {raw['dtype']}, which is not supported", path=str(file))
    shape, offsets = raw["shape"], raw["data_offsets"]
    if len(shape) > _MAX_DIMS or len(offsets) != 2 or not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, *offsets)):
        raise ValueError(f"tensor {name!r} has a shape or offsets that are not numbers of a file")
    shape, (begin, end) = tuple(shape), offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} does not take bytes {begin} to {end}")
    return TensorEntry(file, base + begin, nbytes, dtype, shape)


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}", path=str(file)) from error


def _hash_chunk(descriptor: int, offset: int) -> bytes:
    return hashlib.sha256(os.pread(descriptor, _CHUNK_BYTES, offset)).digest()


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
