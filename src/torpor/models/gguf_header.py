"""Walks a GGUF file's structure and checks every length against the file, before a library that trusts them reads it.

Layout (little endian): magic, version, counts; key-value pairs; tensor infos; padding; tensor data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from torpor.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # value type -> struct format
_INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)
_FLOATS = (6, 12)
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class GgufSummary:
    architecture: str
    num_tensors: int
    num_parameters: int
    rope_scaling: str | None = None  # as the file names it; None: rotary frequencies are those of the base alone
    sliding_window: int | None = None


def check_gguf(path: Path) -> GgufSummary:
    """ModelError that says at which byte the structure breaks, or by how much the file is too short."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != _MAGIC:
                raise ModelError(f"{path}: not a GGUF file (it does not begin with 'GGUF')", path=str(path))
            with mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as data:
                return _Walker(path, data).walk()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}", path=str(path)) from error


class _Walker:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 4
        self._alignment = 32
        self._architecture = ""
        self._layers = 0
        self._scaling_type, self._scaling_factor = "none", 0.0
        self._sliding_window: int | None = None

    def walk(self) -> GgufSummary:
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF version {version} is not supported (2 and 3 are)", path=str(self._path))
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_pairs):
            self._pair()
        infos = [self._tensor_info() for _ in range(num_tensors)]
        base = -(-self._at // self._alignment) * self._alignment
        if self._layers > num_tensors:
            self._fail(f"it names {self._layers} layers and has {num_tensors} tensors")
        end = 0
        for name, offset, nbytes, _ in sorted(infos, key=lambda info: info[1:3]):
            if offset < end:  # a small file could make any number of large tensors
                self._fail(f"tensor {name!r} shares its bytes with another")
            end = offset + nbytes
            if base + end > len(self._data):
                self._fail(f"tensor {name!r} ends at byte {base + end}, the file at {len(self._data)}: truncated")
        return GgufSummary(
            self._architecture,
            num_tensors,
            sum(info[3] for info in infos),
            rope_scaling=self._rope_scaling([info[0] for info in infos]),
            sliding_window=self._sliding_window,
        )

    def _rope_scaling(self, names: list[str]) -> str | None:
        factors = next((name for name in names if name.startswith("rope_f")), None)  # rope_freqs, rope_factors_long, ..._short
        if factors is not None:
            return factors
        scaled = self._scaling_type != "none" and self._scaling_factor != 1.0
        return f"{self._scaling_type} with the factor {self._scaling_factor:g}" if scaled else None

    def _fail(self, reason: str) -> None:
        raise ModelError(f"{self._path}: damaged GGUF: {reason}", path=str(self._path))

    def _take(self, nbytes: int) -> int:
        """Moves over ``nbytes`` and returns where they begin."""
        begin = self._at
        if nbytes > len(self._data) - begin:
            self._fail(f"{nbytes} bytes are needed at byte {begin}, the file has {len(self._data)}: truncated, or a wrong length")
        self._at = begin + nbytes
        return begin

    def _scalar(self, fmt: str) -> int:
        begin = self._take(struct.calcsize(fmt))
        value: int = struct.unpack_from("<" + fmt, self._data, begin)[0]
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        begin = self._take(length)
        return self._data[begin : begin + length].decode("utf-8", "replace")

    def _pair(self) -> None:
        key = self._string()
        kind = self._scalar("I")
        if key == "general.alignment" and kind == 4:
            self._alignment = self._scalar("I")
            if self._alignment <= 0 or self._alignment & (self._alignment - 1):
                self._fail(f"alignment {self._alignment} is not a power of two")
        elif key == "general.architecture" and kind == _STRING:
            self._architecture = self._string()
        elif key.endswith(".block_count") and kind in _INTEGERS:
            self._layers = max(self._layers, self._scalar(_SCALARS[kind]))
        elif key.endswith(".rope.scaling.type") and kind == _STRING:
            self._scaling_type = self._string()
        elif key.endswith(".rope.scaling.factor") and kind in _FLOATS:
            self._scaling_factor = self._scalar(_SCALARS[kind])
        elif key.endswith(".attention.sliding_window") and kind in _INTEGERS:
            self._sliding_window = self._scalar(_SCALARS[kind])
        else:
            self._value(key, kind)

    def _value(self, key: str, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind in _SCALARS:
            self._take(struct.calcsize(_SCALARS[kind]))
        elif kind == _ARRAY:
            self._array(key)
        else:
            self._fail(f"key {key!r} has the unknown value type {kind} at byte {self._at}")

    def _array(self, key: str) -> None:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            self._take(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self._take(self._scalar("Q"))
        else:
            self._fail(f"key {key!r} is an array of the unknown value type {kind} at byte {self._at}")

    def _tensor_info(self) -> tuple[str, int, int, int]:
        """name, offset within the data, bytes, elements"""
        name = self._string()
        num_dims = self._scalar("I")
        if num_dims > _MAX_DIMS:
            self._fail(f"tensor {name!r} has {num_dims} dimensions")
        elements = math.prod(self._scalar("Q") for _ in range(num_dims))
        kind, offset = self._scalar("I"), self._scalar("Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            self._fail(f"tensor {name!r} has the unknown quantisation type {kind}")
        return name, offset, -(-elements // block) * block_bytes, elements
