"""A registration that pins pages, as an RDMA memory region does, without a NIC: io_uring's registered buffers.

The kernel pins what is registered until it is unregistered, whatever happens to the mapping, so reads and writes through it reach
the pages that were there at registration. That is exactly what makes a sleep under a live registration wrong: the old bytes are
read with success, writes are lost, and the memory is held (VmPin and the memory cgroup show it; Shmem does not).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from types import TracebackType

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # system calls, the same on every architecture
_REGISTER_BUFFERS, _UNREGISTER_BUFFERS = 0, 1
_READ_FIXED, _WRITE_FIXED = 4, 5
_GET_EVENTS = 1
_SQ_RING, _CQ_RING, _SQES = 0, 0x8000000, 0x10000000  # what mmap of the ring shows
_ENTRIES = 4
_SQE = struct.Struct("<BBHiQQIIQHH20x")  # opcode flags ioprio fd off addr len rw_flags user_data buf_index personality
_CQE = struct.Struct("<QiI")
_PARAMS_BYTES = 120
_SQ_OFFSETS, _CQ_OFFSETS = 40, 80  # in io_uring_params: head tail ring_mask ring_entries ...
_SQ_ARRAY = 24  # index of the array's offset in sq_off, in bytes
_CQ_CQES = 20
MAX_BUFFER_BYTES = 1 << 30  # the kernel's limit for one registered buffer

_libc = ctypes.CDLL(None, use_errno=True)


def _system_call(number: int, *arguments: int) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} (io_uring call {number})")
    return result


def pinning_is_permitted() -> bool:
    """False where the kernel, a seccomp filter or a sysctl forbids io_uring."""
    params = ctypes.create_string_buffer(_PARAMS_BYTES)
    try:
        os.close(_system_call(_SETUP, _ENTRIES, ctypes.addressof(params)))
    except OSError:
        return False
    return True


class _Ring:
    """One submission, one completion, at a time."""

    def __init__(self) -> None:
        params = ctypes.create_string_buffer(_PARAMS_BYTES)
        self.fd = _system_call(_SETUP, _ENTRIES, ctypes.addressof(params))
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self.fd)
            self._sq = undo.enter_context(mmap.mmap(self.fd, mmap.PAGESIZE, offset=_SQ_RING))
            self._cq = undo.enter_context(mmap.mmap(self.fd, mmap.PAGESIZE, offset=_CQ_RING))
            self._sqes = undo.enter_context(mmap.mmap(self.fd, mmap.PAGESIZE, offset=_SQES))
            self._close = undo.pop_all().close
        self._sq_tail, self._sq_mask = struct.unpack_from("<4xII", params, _SQ_OFFSETS)
        (self._sq_array,) = struct.unpack_from("<I", params, _SQ_OFFSETS + _SQ_ARRAY)
        self._cq_head, _tail, self._cq_mask = struct.unpack_from("<III", params, _CQ_OFFSETS)
        (self._cqes,) = struct.unpack_from("<I", params, _CQ_OFFSETS + _CQ_CQES)

    def register(self, opcode: int, address: int, count: int) -> None:
        _system_call(_REGISTER, self.fd, opcode, address, count)

    def run(self, opcode: int, fd: int, address: int, nbytes: int) -> None:
        """Between offset 0 of ``fd`` and the registered buffer. OSError, or EOFError when fewer bytes were moved."""
        tail = self._u32(self._sq, self._sq_tail)
        index = tail & self._u32(self._sq, self._sq_mask)
        _SQE.pack_into(self._sqes, index * 64, opcode, 0, 0, fd, 0, address, nbytes, 0, 0, 0, 0)
        struct.pack_into("<I", self._sq, self._sq_array + 4 * index, index)
        struct.pack_into("<I", self._sq, self._sq_tail, tail + 1)
        _system_call(_ENTER, self.fd, 1, 1, _GET_EVENTS, 0, 0)
        head = self._u32(self._cq, self._cq_head)
        slot = head & self._u32(self._cq, self._cq_mask)
        _, result, _ = _CQE.unpack_from(self._cq, self._cqes + slot * _CQE.size)
        struct.pack_into("<I", self._cq, self._cq_head, head + 1)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        if result != nbytes:
            raise EOFError(f"{result} of {nbytes} bytes moved")

    @staticmethod
    def _u32(ring: mmap.mmap, offset: int) -> int:
        value: int = struct.unpack_from("<I", ring, offset)[0]
        return value

    def close(self) -> None:
        self._close()


class PinnedRegistration:
    """``nbytes`` from ``address`` on, pinned. ``remote_read`` and ``remote_write`` are what a peer would do with the key of an
    RDMA region: they work on the pinned pages. OSError EFAULT when the range is not mapped, ENOMEM over RLIMIT_MEMLOCK."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._ring: _Ring | None = None
        ring = _Ring()
        try:
            self._wire = os.memfd_create("torpor-test-wire")
        except BaseException:
            ring.close()
            raise
        self._ring = ring
        try:
            self._register(ring)
        except BaseException:
            self.close()
            raise

    def _register(self, ring: _Ring) -> None:
        if self.nbytes > MAX_BUFFER_BYTES:
            raise ValueError(f"{self.nbytes} bytes are more than the {MAX_BUFFER_BYTES} that one registration takes")
        vector = struct.pack("QQ", self.address, self.nbytes)
        buffer = ctypes.create_string_buffer(vector, len(vector))
        ring.register(_REGISTER_BUFFERS, ctypes.addressof(buffer), 1)

    def remote_read(self, offset: int, nbytes: int) -> bytes:
        self._live().run(_WRITE_FIXED, self._wire, self.address + offset, nbytes)
        return os.pread(self._wire, nbytes, 0)

    def remote_write(self, offset: int, data: bytes) -> None:
        os.pwrite(self._wire, data, 0)
        self._live().run(_READ_FIXED, self._wire, self.address + offset, len(data))

    def _live(self) -> _Ring:
        if self._ring is None:
            raise ValueError("the registration is closed")
        return self._ring

    def close(self) -> None:
        """Unpins, at once. Idempotent."""
        if self._ring is not None:
            ring, self._ring = self._ring, None
            with contextlib.suppress(OSError):  # ENXIO when nothing was registered
                ring.register(_UNREGISTER_BUFFERS, 0, 0)
            ring.close()
            os.close(self._wire)

    def __enter__(self) -> PinnedRegistration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
