"""RDMA verbs for the tests: a page of C (``rdma_verbs.c``), compiled when they start, since most of libibverbs is inline
functions."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

SOURCE = Path(__file__).parent / "rdma_verbs.c"
SUCCESS = 0  # ibv_wc_status
REMOTE_ACCESS_ERROR = 10


def build_verbs(folder: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("bare verbs need a C compiler and libibverbs-dev")
    library = folder / "rdma_verbs.so"
    subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", library, SOURCE, "-libverbs"], check=True, timeout=60)
    return library


class Address(ctypes.Structure):
    _fields_ = (("gid", ctypes.c_uint8 * 16), ("qpn", c_uint32))


@dataclass(frozen=True)
class Key:
    """What a peer needs to reach a registration."""

    address: int
    nbytes: int
    rkey: int


class Registration:
    """``ibv_reg_mr``: the pages are pinned, and reached by the device, until ``close``."""

    def __init__(self, verbs: Verbs, address: int, nbytes: int) -> None:
        local, remote = c_uint32(), c_uint32()
        self._library = verbs.library
        self._handle = self._library.tv_register(verbs.handle, address, nbytes, ctypes.byref(local), ctypes.byref(remote))
        if not self._handle:
            code = ctypes.get_errno()
            raise OSError(code, f"ibv_reg_mr: {os.strerror(code)}")
        self.lkey = local.value
        self.key = Key(address, nbytes, remote.value)

    def close(self) -> None:
        """Idempotent."""
        handle, self._handle = self._handle, None
        if handle:
            assert self._library.tv_deregister(handle) == 0


class Verbs:
    """One connection's end."""

    def __init__(self, library: Path, device: str) -> None:
        self.library = _declared(ctypes.CDLL(str(library), use_errno=True))
        self.handle = self.library.tv_open(device.encode())
        if not self.handle:
            raise OSError(ctypes.get_errno(), f"{device} cannot be opened")

    def address(self) -> bytes:
        mine = Address()
        assert self.library.tv_address(self.handle, ctypes.byref(mine)) == 0
        return bytes(mine)

    def connect(self, peer: bytes) -> None:
        code = self.library.tv_connect(self.handle, ctypes.byref(Address.from_buffer_copy(peer)))
        assert code == 0, os.strerror(-code)

    def register(self, address: int, nbytes: int) -> Registration:
        return Registration(self, address, nbytes)

    def read(self, into: Registration, source: Key, nbytes: int, offset: int = 0) -> int:
        """From the peer's memory into the start of ours: a status, SUCCESS or another."""
        return self._move(False, into, source, nbytes, offset)

    def write(self, content: Registration, target: Key, nbytes: int, offset: int = 0) -> int:
        return self._move(True, content, target, nbytes, offset)

    def _move(self, write: bool, ours: Registration, theirs: Key, nbytes: int, offset: int) -> int:
        status: int = self.library.tv_move(
            self.handle, write, ours.key.address, ours.lkey, theirs.address + offset, theirs.rkey, nbytes
        )
        return status

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle:
            self.library.tv_close(handle)

    def __enter__(self) -> Verbs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _declared(library: Any) -> Any:
    library.tv_open.restype, library.tv_open.argtypes = c_void_p, [c_char_p]
    library.tv_close.argtypes = [c_void_p]
    library.tv_address.argtypes = library.tv_connect.argtypes = [c_void_p, POINTER(Address)]
    library.tv_register.restype = c_void_p
    library.tv_register.argtypes = [c_void_p, c_void_p, c_size_t, POINTER(c_uint32), POINTER(c_uint32)]
    library.tv_deregister.argtypes = [c_void_p]
    library.tv_move.argtypes = [c_void_p, c_int, c_uint64, c_uint32, c_uint64, c_uint32, c_uint32]
    return library
