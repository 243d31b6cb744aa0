"""Devices: where regions, imports and arenas are made, mapped, copied and hashed. Addresses and sizes are bytes.

All methods may be called from any thread and block until done; other Python threads run meanwhile. Errors are those of
``torpor.errors``; what a failed call leaves behind is stated in ``torpor.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from torpor.errors import ConfigurationError, TorporError

from .blocks import NO_LIMIT, BlockCopy, Numbers, Uint64Array, Words, blocks_of, uint64
from .library import MAPPED, TpDeviceStats, TpImage, call
from .nvrtc import load_nvrtc
from .objects import Arena, Import, Owned, Region, unsigned
from .types import COPY_KINDS, CopyKind, DeviceStats, Op

BoolArray = npt.NDArray[np.bool_]
Span = tuple[int, int, int]
"""(destination, source, bytes)"""

_FAULTS, _EXPORTABLE, _GUARDED = 1, 1, 2


@dataclasses.dataclass(kw_only=True, eq=False)
class ChunkImage:
    """``nbytes`` of device memory and their image on the host, with one value per chunk in every array."""

    device_address: int
    host_address: int
    nbytes: int
    wanted: BoolArray
    valid: BoolArray  # save only, as the next two
    known: Uint64Array
    source: Uint64Array
    checked: Uint64Array


class Device(Owned):
    """Made by :meth:`open`. Everything on it must be closed before it, but memory of torch that nobody owns any more: the device
    then goes with the last of that."""

    _destroy, _what = "tp_device_close", "device"

    def __init__(self, handle: int, driver: str) -> None:
        self._handle = handle
        self.driver = driver
        self.copies_beside = driver == "cuda"  # what is begun goes on while its caller does something else
        self.granularity = self.stats().granularity  # smallest extent

    @staticmethod
    def open(driver: str, ordinal: int = 0, *, faults: bool = False) -> Device:
        """``driver``: "host" or "cuda". ``faults`` wraps it in the one that :meth:`arm_fault` commands.

        Raises ConfigurationError when the driver is unknown, or cannot be used on this machine, with the reason.
        """
        if driver == "cuda":
            load_nvrtc()
        out = ctypes.c_void_p()
        call("tp_device_open", driver.encode(), ordinal, _FAULTS if faults else 0, ctypes.byref(out))
        assert out.value is not None
        return Device(out.value, driver)

    def stats(self) -> DeviceStats:
        """Does not wait for calls in progress."""
        out = TpDeviceStats()
        call("tp_device_get_stats", self.handle, ctypes.byref(out))
        return DeviceStats(**{field.name: getattr(out, field.name) for field in dataclasses.fields(DeviceStats)})

    def free_bytes(self) -> int:
        """What the driver says is free, to anybody, now. What was released a moment ago may be missing."""
        out = ctypes.c_uint64()
        call("tp_device_free_bytes", self.handle, ctypes.byref(out))
        return out.value

    def synchronize(self) -> None:
        """Blocks until everything that this process has asked of the device is done. DeviceError inside a graph capture."""
        call("tp_device_synchronize", self.handle)

    def create_region(
        self, nbytes: int, *, extent_bytes: int, exportable: bool = False, guarded: bool = False, name: str = ""
    ) -> Region:
        """Reserves and maps; both sizes are rounded up to the granularity.

        ``guarded``: while asleep the range reads as zeros instead of faulting, where the driver can do that (P4).
        Raises DeviceMemoryError; nothing is left after a failure.
        """
        out = ctypes.c_void_p()
        flags = (_EXPORTABLE if exportable else 0) | (_GUARDED if guarded else 0)
        sizes = unsigned("nbytes", nbytes), unsigned("extent_bytes", extent_bytes)
        with _nobodys(out, "tp_region_destroy"):
            call("tp_region_create", self.handle, *sizes, flags, name.encode(), ctypes.byref(out))
            assert out.value is not None
            return Region(out.value, name)

    def unmap(self, regions: Sequence[Region]) -> None:
        """Takes the physical memory of the regions away; those asleep are passed over.

        A failure carries ``unmapped``, how many of them are asleep now; the others are whole. The same call goes on from there.
        """
        done = ctypes.c_uint64()
        try:
            call("tp_regions_unmap", _handles(regions), len(regions), ctypes.byref(done))
        except TorporError as error:
            error.fields["unmapped"] = done.value
            raise

    def map(self, regions: Sequence[Region]) -> None:
        """Creates everything before it maps anything (M5); after a failure no region has changed. Mapped ones are passed over."""
        call("tp_regions_map", _handles(regions), len(regions))

    def copy(self, kind: CopyKind, spans: Sequence[Span] | Uint64Array, threads: int = 1) -> None:
        """Blocks until all is copied. Work of the caller's own on that memory must have ended (synchronise your streams).

        Raises StateError when a span lies in memory of this device that is asleep; then nothing was copied.
        """
        if kind not in COPY_KINDS:
            raise ConfigurationError(f"unknown copy kind {kind!r}: known are {', '.join(COPY_KINDS)}", setting="kind", value=kind)
        table = uint64("spans", spans).reshape(-1, 3)
        call("tp_copy", self.handle, COPY_KINDS[kind], table.ctypes.data, len(table), threads)

    def copy_blocks(
        self,
        dst: int | Numbers | Words,
        src: int | Numbers | Words,
        block_bytes: int,
        dst_ids: Numbers | Words,
        src_ids: Numbers | Words,
        *,
        threads: int = 1,
        limits: tuple[int, int] = (NO_LIMIT, NO_LIMIT),
    ) -> None:
        """Block ``dst_ids[i]`` of ``dst`` becomes block ``src_ids[i]`` of ``src``; otherwise like :meth:`copy`.

        ``dst`` and ``src``: the address of block 0, or those of several arrays, all of whose blocks are copied. One call of a
        few microseconds for all of them; arrays of uint64, and ``Words``, are taken as they are. ``limits``: how many blocks an
        array of ``dst`` and of ``src`` has; ConfigurationError, with nothing copied, for an id that is none of them.
        """
        self.begin_copy_blocks(dst, src, block_bytes, dst_ids, src_ids, threads=threads, limits=limits).close()

    def begin_copy_blocks(
        self,
        dst: int | Numbers | Words,
        src: int | Numbers | Words,
        block_bytes: int,
        dst_ids: Numbers | Words,
        src_ids: Numbers | Words,
        *,
        threads: int = 1,
        limits: tuple[int, int] = (NO_LIMIT, NO_LIMIT),
    ) -> BlockCopy:
        """:meth:`copy_blocks` without waiting, where ``copies_beside``. The lists may change at once; what is copied, and where
        to, stays mapped until the copy is closed, which must come before the device is."""
        blocks, kept = blocks_of(dst, src, block_bytes, dst_ids, src_ids, limits)
        begun = BlockCopy.begin(self.handle, blocks, threads)
        del kept
        return begun

    def hash_chunks(self, address: int, nbytes: int, chunk_bytes: int, *, on_host: bool = False, threads: int = 1) -> Uint64Array:
        """One hash per chunk, the last may be shorter. The same bytes have the same hash on every driver and on the host.

        ``chunk_bytes``: a multiple of 8.
        """
        size = unsigned("chunk_bytes", chunk_bytes)
        out = np.empty(-(-unsigned("nbytes", nbytes) // size) if size else 0, dtype=np.uint64)
        call("tp_hash", self.handle, address, nbytes, size, int(on_host), out.ctypes.data, threads)
        return out

    def hash_path(self) -> str:
        """How chunk hashes of device memory are computed, for people: "processor", "kernel on the device", or "staged through
        host memory: " and why (at the speed of the link then). The first call compiles the kernels, which takes up to a second.
        """
        out = ctypes.create_string_buffer(512)
        call("tp_hash_path", self.handle, out, len(out))
        return out.value.decode("utf-8", "replace")

    def save_chunks(self, images: Sequence[ChunkImage], chunk_bytes: int, threads: int = 1) -> None:
        """Brings the ``wanted`` chunks of images up to date: those not valid, or whose hash is no longer the known one.

        ``source`` becomes the hashes of what is wanted, ``checked`` those of what was read from the image after the copy, for
        chunks that were copied. Their ``valid`` is cleared before they are overwritten and stays so, also after a failure: the
        caller compares. Waits for what this process has in flight on the device.
        """
        table = _image_table(images, chunk_bytes)
        call("tp_save", self.handle, table, len(table), chunk_bytes, threads)

    def restore_chunks(self, images: Sequence[ChunkImage], chunk_bytes: int, threads: int = 1) -> None:
        """Copies ``wanted`` chunks from the images; ``checked`` becomes the hashes of what was read on the device afterwards."""
        table = _image_table(images, chunk_bytes)
        call("tp_restore", self.handle, table, len(table), chunk_bytes, threads)

    def wake(
        self,
        regions: Sequence[Region],
        images: Sequence[ChunkImage],
        chunk_bytes: int,
        threads: int = 1,
        mapped: Callable[[], None] | None = None,
    ) -> None:
        """:meth:`map` and :meth:`restore_chunks` in one. On ``cuda`` both go on at once: what has memory is copied to while the
        rest gets it, in the order of the regions. ``mapped`` is called once, on this thread, when all regions are mapped, while
        the copies go on; what it raises leaves here when they have ended, also where they have failed.

        A failure to create or map leaves every region as it was, and ``mapped`` uncalled. After another failure they may be
        mapped, their content undefined: :meth:`unmap` them.
        """
        table, told = _image_table(images, chunk_bytes), _Told(mapped)
        lists = _handles(regions), len(regions), table, len(table)
        try:
            call("tp_wake", self.handle, *lists, chunk_bytes, threads, told.pointer, None)
        finally:
            told.raise_what_was_raised()

    def create_arena(self, nbytes: int) -> Arena:
        """Host address space for images; costs no memory until committed."""
        out, address = ctypes.c_void_p(), ctypes.c_uint64()
        with _nobodys(out, "tp_arena_destroy"):
            call("tp_arena_create", self.handle, unsigned("nbytes", nbytes), ctypes.byref(out), ctypes.byref(address))
            assert out.value is not None
            return Arena(out.value, address.value, nbytes)

    def import_extents(self, fds: Sequence[int], sizes: Sequence[int], *, writable: bool = False) -> Import:
        """Maps another process's exported extents, one after another, into one range. The descriptors stay the caller's.

        Raises ConfigurationError for a descriptor that is no exported extent of that size.
        """
        if len(fds) != len(sizes):
            raise ConfigurationError(f"{len(fds)} descriptors, but {len(sizes)} sizes")
        out, address = ctypes.c_void_p(), ctypes.c_uint64()
        table = uint64("sizes", sizes)
        with _nobodys(out, "tp_import_close"):
            call(
                "tp_import_open",
                self.handle,
                (ctypes.c_int32 * len(fds))(*fds),
                table.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)),
                len(fds),
                int(writable),
                ctypes.byref(out),
                ctypes.byref(address),
            )
            assert out.value is not None
            return Import(out.value, address.value, sum(sizes))

    def arm_fault(self, op: Op, nth: int, count: int = 1) -> None:
        """The nth call of ``op`` from now on (1 is the next) fails, and so do the ``count - 1`` after it."""
        call("tp_fault_arm", self.handle, int(op), unsigned("nth", nth), unsigned("count", count))

    def clear_faults(self) -> None:
        call("tp_fault_clear", self.handle)

    def fault_calls(self, op: Op) -> int:
        """Calls of ``op`` since the device was opened."""
        out = ctypes.c_uint64()
        call("tp_fault_calls", self.handle, int(op), ctypes.byref(out))
        return out.value

    def __repr__(self) -> str:
        return f"<Device {self.driver}{' closed' if self.closed else ''}>"


@contextlib.contextmanager
def _nobodys(out: ctypes.c_void_p, destroy: str) -> Iterator[None]:
    """Ends what the block's call has made when the block raises: an interrupt is raised when the call is over."""
    try:
        yield
    except BaseException:
        if out.value is not None:
            call(destroy, out.value)
        raise


class _Told:
    """A function for the library to call. ctypes drops what it raises, so it is kept."""

    def __init__(self, function: Callable[[], None] | None) -> None:
        self._function = function
        self._raised: BaseException | None = None
        self.pointer = MAPPED(self._run) if function is not None else MAPPED()

    def _run(self, _context: object) -> None:
        assert self._function is not None
        try:
            self._function()
        except BaseException as error:
            self._raised = error

    def raise_what_was_raised(self) -> None:
        if self._raised is not None:
            raise self._raised


def _image_table(images: Sequence[ChunkImage], chunk_bytes: int) -> ctypes.Array[TpImage]:
    """The library reads and writes one element per chunk of every array."""
    table = (TpImage * len(images))()
    for entry, image in zip(table, images, strict=True):
        count = -(-image.nbytes // chunk_bytes) if chunk_bytes > 0 else 0
        for name in ("wanted", "valid", "known", "source", "checked"):
            array = getattr(image, name)
            if array.size != count or not array.flags.c_contiguous:
                raise ConfigurationError(f"{array.size} values for {count} chunks, or not contiguous", setting=name)
            setattr(entry, name, array.__array_interface__["data"][0])
        entry.device_address, entry.host_address, entry.bytes = image.device_address, image.host_address, image.nbytes
    return table


def _handles(regions: Iterable[Region]) -> ctypes.Array[ctypes.c_void_p]:
    handles = [region.handle for region in regions]
    return (ctypes.c_void_p * len(handles))(*handles)
