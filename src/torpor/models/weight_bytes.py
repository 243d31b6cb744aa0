"""How much memory a model's weights will take, by the headers of its files: before torch is imported, in milliseconds."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from torpor.models.config import ModelConfig

_ALIGN_BYTES = 256  # of tensors in pools
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_FLOATS = ("F64", "F32", "F16", "BF16")
_COMPUTED = {"float32": 4, "bfloat16": 2, "float16": 2}


def expected_weight_bytes(config: ModelConfig) -> int | None:
    """Of the tensors that a folder of safetensors has, in the dtype that is asked for; None for what cannot be told so: other
    sources, random weights, damaged files, about which whoever loads them complains. An estimate: a model may leave tensors out
    or keep some in another dtype."""
    folder = Path(config.source).expanduser()
    if config.load_format != "auto" or not folder.is_dir():
        return None
    try:
        tensors = [tensor for file in _files_of(folder) for tensor in _read_header(file)]
        return sum(_bytes_of(*tensor, config.dtype) for tensor in tensors) or None
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _files_of(folder: Path) -> list[Path]:
    """Those that ``open_checkpoint`` would read."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    if not all(Path(name).name == name for name in names):
        raise ValueError("a file that is not in the folder")
    return [folder / name for name in names]


def _read_header(file: Path) -> list[tuple[str, int]]:
    """(dtype, elements) of every tensor. For a file that does not have them all nothing is taken."""
    if not file.is_file():
        raise ValueError("no file")
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError("not a safetensors file")
        header = json.loads(stream.read(length))
    tensors = [(entry["dtype"], _elements(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
    if 8 + length + sum(elements * _STORED[dtype] for dtype, elements in tensors) != file.stat().st_size:
        raise ValueError("damaged")
    return tensors


def _elements(shape: list[Any]) -> int:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("a shape that is none")
    return math.prod(shape)


def _bytes_of(stored: str, elements: int, dtype: str) -> int:
    size = _COMPUTED.get(dtype, min(4, _STORED[stored])) if stored in _FLOATS else _STORED[stored]
    return -(-elements * size // _ALIGN_BYTES) * _ALIGN_BYTES
