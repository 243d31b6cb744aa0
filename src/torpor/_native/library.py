"""Loads the native library, declares its functions, and turns its status into an exception: here and nowhere else."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_char, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from torpor.errors import (
    BugError,
    ConfigurationError,
    DeviceError,
    DeviceMemoryError,
    HostMemoryError,
    StateError,
    TorporError,
)

from .types import Op

ABI_VERSION = 6
LIBRARY_NAME = "libtorpor_native.so"

TP_OK, TP_INVALID, TP_STATE, TP_DEVICE_MEMORY, TP_HOST_MEMORY, TP_DRIVER, TP_UNSUPPORTED, TP_INTERNAL = range(8)


class TpError(ctypes.Structure):
    _fields_ = (
        ("status", c_int32),
        ("op", c_int32),
        ("code", c_int64),
        ("bytes_needed", c_uint64),
        ("bytes_free", c_uint64),
        ("message", c_char * 256),
    )


class TpDeviceStats(ctypes.Structure):
    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "granularity",
            "live_regions",
            "live_extents",
            "live_imports",
            "live_arenas",
            "reserved_bytes",
            "mapped_bytes",
            "condemned_bytes",
            "imported_bytes",
            "committed_bytes",
            "spare_bytes",
        )
    )


class TpAhead(ctypes.Structure):
    _fields_ = (
        ("asked_bytes", c_uint64),
        ("taken_bytes", c_uint64),
        ("seconds", c_double),
        ("active", c_int32),
        ("failed", c_int32),
        ("failure", TpError),
    )


class TpRegionStats(ctypes.Structure):
    _fields_ = (
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("extent_bytes", c_uint64),
        ("extents", c_uint64),
        ("mapped", c_int32),
        ("condemned_bytes", c_uint64),
    )


class TpExtent(ctypes.Structure):
    _fields_ = (("bytes", c_uint64), ("device_id", c_uint64), ("inode", c_uint64), ("flags", c_uint64))


class TpImage(ctypes.Structure):
    _fields_ = (
        ("device_address", c_uint64),
        ("host_address", c_uint64),
        ("bytes", c_uint64),
        ("wanted", c_void_p),
        ("valid", c_void_p),
        ("known", c_void_p),
        ("source", c_void_p),
        ("checked", c_void_p),
    )


class TpBlocks(ctypes.Structure):
    _fields_ = (
        ("dst", c_void_p),
        ("src", c_void_p),
        ("arrays", c_uint64),
        ("block_bytes", c_uint64),
        ("dst_ids", c_void_p),
        ("src_ids", c_void_p),
        ("count", c_uint64),
        ("dst_limit", c_uint64),
        ("src_limit", c_uint64),
    )


class TpTorchRefusal(ctypes.Structure):
    _fields_ = (("count", c_uint64), ("last", TpError))


MAPPED = ctypes.CFUNCTYPE(None, c_void_p)

_U64P = POINTER(c_uint64)
_HANDLE = c_void_p
_HANDLE_OUT = POINTER(c_void_p)

# Arguments without the closing tp_error*, which every one of them has.
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "tp_device_open": (c_char_p, c_int32, c_uint32, _HANDLE_OUT),
    "tp_device_close": (_HANDLE,),
    "tp_device_synchronize": (_HANDLE,),
    "tp_device_get_stats": (_HANDLE, POINTER(TpDeviceStats)),
    "tp_device_free_bytes": (_HANDLE, _U64P),
    "tp_fault_arm": (_HANDLE, c_int32, c_uint64, c_uint64),
    "tp_fault_clear": (_HANDLE,),
    "tp_fault_calls": (_HANDLE, c_int32, _U64P),
    "tp_region_create": (_HANDLE, c_uint64, c_uint64, c_uint32, c_char_p, _HANDLE_OUT),
    "tp_region_destroy": (_HANDLE,),
    "tp_region_get_stats": (_HANDLE, POINTER(TpRegionStats)),
    "tp_regions_unmap": (_HANDLE_OUT, c_uint64, _U64P),
    "tp_regions_map": (_HANDLE_OUT, c_uint64),
    "tp_region_extents": (_HANDLE, POINTER(TpExtent), c_uint64, _U64P),
    "tp_region_export": (_HANDLE, POINTER(c_int32), c_uint64, _U64P),
    "tp_import_open": (_HANDLE, POINTER(c_int32), _U64P, c_uint64, c_int32, _HANDLE_OUT, _U64P),
    "tp_import_close": (_HANDLE,),
    "tp_copy": (_HANDLE, c_int32, c_void_p, c_uint64, c_uint32),
    "tp_block_copy_begin": (_HANDLE, POINTER(TpBlocks), c_uint32, _HANDLE_OUT),
    "tp_block_copy_end": (_HANDLE,),
    "tp_hash": (_HANDLE, c_uint64, c_uint64, c_uint64, c_int32, c_void_p, c_uint32),
    "tp_hash_path": (_HANDLE, c_char_p, c_uint64),
    "tp_save": (_HANDLE, POINTER(TpImage), c_uint64, c_uint64, c_uint32),
    "tp_restore": (_HANDLE, POINTER(TpImage), c_uint64, c_uint64, c_uint32),
    "tp_wake": (_HANDLE, _HANDLE_OUT, c_uint64, POINTER(TpImage), c_uint64, c_uint64, c_uint32, MAPPED, c_void_p),
    "tp_arena_create": (_HANDLE, c_uint64, _HANDLE_OUT, _U64P),
    "tp_arena_destroy": (_HANDLE,),
    "tp_arena_commit": (_HANDLE, c_uint64, c_uint64, c_uint32),
    "tp_arena_commit_ahead": (_HANDLE, c_uint64, c_uint64, c_uint64, c_uint32),
    "tp_arena_end_ahead": (_HANDLE, _U64P),
    "tp_arena_get_ahead": (_HANDLE, POINTER(TpAhead)),
    "tp_arena_decommit": (_HANDLE, c_uint64, c_uint64),
    "tp_arena_adopt": (_HANDLE, c_uint64, c_uint64, c_int32, c_uint64, c_uint32),
    "tp_host_free_bytes": (_U64P,),
    "tp_torch_open": (_HANDLE, c_int32, c_uint64, c_uint32, c_char_p, POINTER(c_uint32)),
    "tp_torch_set_mode": (c_uint32, c_int32),
    "tp_torch_take": (c_uint32, _HANDLE_OUT, c_uint64, _U64P, _U64P, c_uint64, _U64P),
    "tp_torch_get_refusal": (c_uint32, POINTER(TpTorchRefusal)),
    "tp_torch_disown": (c_uint32,),
}


def find_library() -> Path:
    """The library beside this package. An editable install spreads a package over two folders, so all of them are looked at, this
    file's own first: what scripts/build has made is newer than what was installed."""
    from torpor import _native

    folders = sorted((Path(folder) for folder in _native.__path__), key=lambda folder: folder != Path(__file__).parent)
    for folder in folders:
        if (folder / LIBRARY_NAME).is_file():
            return folder / LIBRARY_NAME
    raise ConfigurationError(
        f"torpor's native library {LIBRARY_NAME} is not in {', '.join(map(str, folders))}: "
        "run scripts/build in the source tree, or install the package with pip",
        setting="installation",
        value=LIBRARY_NAME,
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, its functions typed. ctypes lets other Python threads run during every call."""
    path = find_library()
    try:
        loaded = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise ConfigurationError(f"cannot load {path}: {error}", setting="installation", value=str(path)) from error
    loaded.tp_abi_version.restype = c_int32
    found = loaded.tp_abi_version()
    if found != ABI_VERSION:
        raise ConfigurationError(
            f"{path} has ABI version {found}, this package needs {ABI_VERSION}: run scripts/build, or install the package again",
            setting="installation",
            value=found,
        )
    for name, arguments in _PROTOTYPES.items():
        function = getattr(loaded, name)
        function.argtypes = (*arguments, POINTER(TpError))
        function.restype = c_int32
    return loaded


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the library; raises what its status means."""
    error = TpError()
    if getattr(library(), name)(*arguments, ctypes.byref(error)) != TP_OK:
        raise exception_of(error)


def exception_of(error: TpError) -> TorporError:
    message = error.message.decode("utf-8", "replace")
    needed, free = error.bytes_needed, error.bytes_free
    if error.status == TP_STATE:
        return StateError(message)
    if error.status == TP_DEVICE_MEMORY:
        return DeviceMemoryError(message, bytes_needed=needed, bytes_free=free)
    if error.status == TP_HOST_MEMORY:
        return HostMemoryError(message, bytes_needed=needed, bytes_free=free)
    if error.status == TP_DRIVER:
        operation = Op(error.op).name.lower() if 0 <= error.op < len(Op) else "unknown"
        return DeviceError(message, operation=operation, code=error.code)
    if error.status in (TP_INVALID, TP_UNSUPPORTED):
        return ConfigurationError(message)
    return BugError(message)
