"""Lists of blocks as the library reads them, and copies that it was asked to begin."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torpor.errors import ConfigurationError

from .library import TpBlocks, call
from .objects import Owned, unsigned

Uint64Array = npt.NDArray[np.uint64]
Numbers = Sequence[int] | Uint64Array

NO_LIMIT = (1 << 64) - 1


class Words:
    """Unsigned numbers of 64 bits at one place in memory, which do not change. Made once where the same list is used again: the
    address of an array takes longer to find out than a short list to copy."""

    __slots__ = ("_kept", "address", "count")

    def __init__(self, numbers: array[int] | Uint64Array) -> None:
        """``numbers``: of type "q" or "Q", or uint64 and contiguous. A negative one counts as a very large one."""
        if isinstance(numbers, array):
            self.address, self.count = numbers.buffer_info()
        else:
            self.address, self.count = int(numbers.ctypes.data), numbers.size
        self._kept = numbers

    @classmethod
    def of(cls, name: str, numbers: Numbers | Words) -> Words:
        """ConfigurationError for what are no such numbers."""
        return numbers if isinstance(numbers, Words) else cls(uint64(name, numbers))

    def part(self, which: slice) -> Words:
        """``which``: of step 1."""
        start, stop, _ = which.indices(self.count)
        part = Words.__new__(Words)
        part.address, part.count, part._kept = self.address + 8 * start, stop - start, self._kept
        return part

    def __len__(self) -> int:
        return self.count


def blocks_of(
    dst: int | Numbers | Words,
    src: int | Numbers | Words,
    block_bytes: int,
    dst_ids: Numbers | Words,
    src_ids: Numbers | Words,
    limits: tuple[int, int],
) -> tuple[TpBlocks, Any]:
    """What the library is given, and what must live until it has returned."""
    to, source = (Words.of(name, [at] if isinstance(at, int) else at) for name, at in (("dst", dst), ("src", src)))
    to_ids, source_ids = Words.of("dst_ids", dst_ids), Words.of("src_ids", src_ids)
    for here, there, what in ((to, source, "arrays"), (to_ids, source_ids, "blocks")):
        if here.count != there.count:
            raise ConfigurationError(f"{here.count} destination {what}, but {there.count} source {what}")
    size, ids = unsigned("block_bytes", block_bytes), (to_ids.address, source_ids.address, to_ids.count)
    return TpBlocks(to.address, source.address, to.count, size, *ids, *limits), (to, source, to_ids, source_ids)


class BlockCopy(Owned):
    """Blocks that the device was asked to copy."""

    _destroy, _what = "tp_block_copy_end", "block copy"

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @staticmethod
    def begin(device: int, blocks: TpBlocks, threads: int) -> BlockCopy:
        out = ctypes.c_void_p()
        call("tp_block_copy_begin", device, ctypes.byref(blocks), threads, ctypes.byref(out))
        assert out.value is not None
        return BlockCopy(out.value)

    def close(self) -> None:
        """Blocks until they are copied, or never will be: DeviceError. From any thread. Idempotent, also after an error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            call(self._destroy, handle)


def uint64(name: str, values: Sequence[Any] | Uint64Array) -> Uint64Array:
    if isinstance(values, np.ndarray) and values.dtype == np.uint64 and values.flags.c_contiguous:
        return values
    numbers = np.asarray(values) if len(values) else np.empty(0, dtype=np.uint64)
    if numbers.dtype.kind not in "iu" or (numbers.dtype.kind == "i" and numbers.size and int(numbers.min()) < 0):
        raise ConfigurationError(f"{name} must be 64-bit unsigned numbers", setting=name)
    return np.ascontiguousarray(numbers, dtype=np.uint64)
