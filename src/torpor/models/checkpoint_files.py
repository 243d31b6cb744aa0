"""Which safetensors files a folder has, what their headers say, and their content's identity.

Headers are checked against the file before anything is read: a damaged or truncated file is a ModelError that names it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torpor.errors import ModelError
from torpor.models.file_errors import naming
from torpor.models.hardware import usable_cores

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_NAME = 255  # of a file
_MAX_DIMS = 16
CHUNK_BYTES = 16 << 20
MAX_READERS = 8

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


def sign_files(files: Iterable[Path]) -> tuple[tuple[int, int, int], ...]:
    try:
        return tuple((s.st_size, s.st_mtime_ns, s.st_ino) for s in (file.stat() for file in files))
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}", path=str(error.filename)) from error


def hash_files(files: Iterable[Path]) -> str:
    """32 hex digits over the content of ``files`` in order; chunks are hashed in parallel, then their hashes."""
    total = hashlib.sha256()
    with ThreadPoolExecutor(min(MAX_READERS, usable_cores())) as pool:
        for file in files:
            descriptor = open_file(file)
            try:
                size = os.fstat(descriptor).st_size
                total.update(struct.pack("<Q", size))
                offsets = range(0, size, CHUNK_BYTES)
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


def find_files(folder: Path) -> tuple[Path, ...]:
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


def read_header(file: Path) -> dict[str, TensorEntry]:
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


def open_file(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}", path=str(file)) from error


def _hash_chunk(descriptor: int, offset: int) -> bytes:
    return hashlib.sha256(os.pread(descriptor, CHUNK_BYTES, offset)).digest()
