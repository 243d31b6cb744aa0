"""What lives on a device: regions, imports and arenas. Addresses and sizes are bytes.

``close()`` and ``destroy()`` do nothing the second time. Errors are those of ``torpor.errors``; what a failed call leaves behind
is stated in ``torpor.h``.
"""

from __future__ import annotations

import ctypes
import warnings
from types import TracebackType
from typing import Any

from torpor.errors import ConfigurationError, StateError, TorporError

from .library import TpAhead, TpExtent, TpRegionStats, call
from .types import Ahead, ExtentInfo

_RDMA = 1


class Owned:
    """A native object that this one owns."""

    _handle: int | None = None
    _destroy = ""  # the function that ends it
    _what = "object"

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise StateError(f"the {self._what} is closed", state="closed")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Idempotent. After a failure the object is as alive as before, and the call can be repeated."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            call(self._destroy, handle)
        except TorporError:
            self._handle = handle
            raise

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._handle is not None:
            warnings.warn(f"a {self._what} was never closed: {self!r}", ResourceWarning, source=self, stacklevel=2)


class Region(Owned):
    """A reserved range, mapped or asleep. Its address is for life (M1)."""

    _destroy, _what = "tp_region_destroy", "region"

    def __init__(self, handle: int, name: str) -> None:
        self._handle = handle
        self.name = name
        stats = self._stats()
        self.address: int = stats.address
        self.nbytes: int = stats.bytes
        self.extent_bytes: int = stats.extent_bytes
        self._extent_count: int = stats.extents

    def _stats(self) -> TpRegionStats:
        out = TpRegionStats()
        call("tp_region_get_stats", self.handle, ctypes.byref(out))
        return out

    @property
    def mapped(self) -> bool:
        return bool(self._stats().mapped)

    @property
    def condemned_bytes(self) -> int:
        """Unmapped, but the driver refused to release it. The next unmap, map or destroy tries again."""
        return int(self._stats().condemned_bytes)

    def extents(self) -> tuple[ExtentInfo, ...]:
        """In address order; none while asleep."""
        out, count = (TpExtent * self._extent_count)(), ctypes.c_uint64()
        call("tp_region_extents", self.handle, out, self._extent_count, ctypes.byref(count))
        return tuple(_extent_info(extent) for extent in out[: count.value])

    def export(self) -> tuple[int, ...]:
        """New file descriptors in address order, close-on-exec, the caller's to close. StateError while asleep."""
        out, count = (ctypes.c_int32 * self._extent_count)(), ctypes.c_uint64()
        call("tp_region_export", self.handle, out, self._extent_count, ctypes.byref(count))
        return tuple(out[: count.value])

    def destroy(self) -> None:
        """Unmaps if mapped, releases, frees the addresses. Idempotent; after a failure it can be repeated."""
        self.close()

    def forget(self) -> None:
        """Somebody else owns the region from here on."""
        self._handle = None

    def __repr__(self) -> str:
        return f"<Region {self.name!r} {self.nbytes} bytes{' destroyed' if self.closed else ''}>"


class Import(Owned):
    """Extents of another process, mapped here until closed, whatever their owner does."""

    _destroy, _what = "tp_import_close", "import"

    def __init__(self, handle: int, address: int, nbytes: int) -> None:
        self._handle = handle
        self.address = address
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"<Import {self.nbytes} bytes{' closed' if self.closed else ''}>"


class Arena(Owned):
    """Host address space; only committed parts have memory."""

    _destroy, _what = "tp_arena_destroy", "arena"

    def __init__(self, handle: int, address: int, nbytes: int) -> None:
        self._handle = handle
        self.address = address
        self.nbytes = nbytes

    def commit(self, offset: int, nbytes: int, threads: int = 1) -> None:
        """Backs whole pages around the range with memory; what is committed already is passed over.

        Raises HostMemoryError, with nothing changed, when the machine or its cgroup has not enough free.
        """
        call("tp_arena_commit", self.handle, unsigned("offset", offset), unsigned("nbytes", nbytes), threads)

    def commit_ahead(self, offset: int, nbytes: int, part_bytes: int, threads: int = 1) -> None:
        """Takes the memory that ``commit`` will be asked for, in parts of ``part_bytes`` (whole pages) in the order of addresses,
        on native threads, and returns at once. Only a matter of time: a commit waits for what is still to come of its own range,
        and takes itself what is not. Until then the memory counts as spare.

        StateError while the arena does so already. HostMemoryError, with nothing begun, when not enough is free for all of it.
        """
        sizes = unsigned("offset", offset), unsigned("nbytes", nbytes), unsigned("part_bytes", part_bytes)
        call("tp_arena_commit_ahead", self.handle, *sizes, threads)

    def end_ahead(self) -> int:
        """Ends that after the parts that are begun, and gives back what is spare; the bytes. Blocks; idempotent."""
        unused = ctypes.c_uint64()
        call("tp_arena_end_ahead", self.handle, ctypes.byref(unused))
        return unused.value

    def ahead(self) -> Ahead:
        out = TpAhead()
        call("tp_arena_get_ahead", self.handle, ctypes.byref(out))
        failure = out.failure.message.decode(errors="replace") if out.failed else ""
        return Ahead(
            asked_bytes=out.asked_bytes,
            taken_bytes=out.taken_bytes,
            seconds=out.seconds,
            active=bool(out.active),
            failure=failure,
        )

    def decommit(self, offset: int, nbytes: int) -> None:
        """Gives the memory of whole pages inside the range back."""
        call("tp_arena_decommit", self.handle, unsigned("offset", offset), unsigned("nbytes", nbytes))

    def adopt(self, offset: int, nbytes: int, fd: int, file_offset: int, threads: int = 1) -> None:
        """Maps a part of a sealed memory file over whole pages, shared and read-only; it counts as committed. What was committed
        there is given back first. ``fd`` stays the caller's, and may be closed.

        ConfigurationError, with nothing changed, for a file that is not sealed or too short. After another error the range is not
        committed.
        """
        place = unsigned("offset", offset), unsigned("nbytes", nbytes)
        call("tp_arena_adopt", self.handle, *place, fd, unsigned("file_offset", file_offset), threads)

    def __repr__(self) -> str:
        return f"<Arena {self.nbytes} bytes{' closed' if self.closed else ''}>"


def host_free_bytes() -> int:
    """Host memory that this process may still take without putting anybody in danger, within every memory cgroup around it."""
    out = ctypes.c_uint64()
    call("tp_host_free_bytes", ctypes.byref(out))
    return out.value


def buffer_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """A writable buffer over memory that somebody else keeps alive; it may be weakly referenced."""
    return (ctypes.c_ubyte * nbytes).from_address(address)


def unsigned(name: str, value: int) -> int:
    """ctypes would wrap a negative number around silently."""
    if not 0 <= value < 1 << 64:
        raise ConfigurationError(f"{name} is {value}: it must be a 64-bit unsigned number", setting=name, value=value)
    return value


def _extent_info(extent: TpExtent) -> ExtentInfo:
    rdma = bool(extent.flags & _RDMA)
    return ExtentInfo(nbytes=extent.bytes, device_id=extent.device_id, inode=extent.inode, rdma=rdma)
