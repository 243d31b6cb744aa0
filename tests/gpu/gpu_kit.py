"""What the GPU tests share: whether there is a GPU, what a process holds on it, and a second process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from torpor._native import library as native
from torpor.errors import TorporError

WAIT_S = 60.0


# ---- the device ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpus:
    """What the driver shows this process. ``why_not``: the reason that there is none."""

    count: int = 0
    uuids: tuple[str, ...] = ()  # as NVML names them
    why_not: str = ""


@functools.cache
def gpus() -> Gpus:
    """Asks libcuda itself, not torch: a CPU build of torch must not hide a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Gpus(why_not=f"no NVIDIA driver: {error}")
    count = ctypes.c_int()
    for call in (lambda: cuda.cuInit(0), lambda: cuda.cuDeviceGetCount(ctypes.byref(count))):
        if code := call():
            return Gpus(why_not=f"the NVIDIA driver shows no device: CUDA error {code}")
    if not count.value:
        return Gpus(why_not="the NVIDIA driver shows no device")
    return Gpus(count.value, tuple(_uuid(cuda, ordinal) for ordinal in range(count.value)))


def _uuid(cuda: ctypes.CDLL, ordinal: int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGetUuid(raw, ordinal)
    text = bytes(raw).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def why_not(count: int = 1) -> str:
    """Empty when ``count`` GPUs can be used by torpor and by torch."""
    found = gpus()
    few = f"needs {count} GPUs, there are {found.count}" if found.count < count else ""
    return found.why_not or few or _why_not_native() or _why_not_torch()


@functools.cache
def _why_not_native() -> str:
    try:
        native.library()
    except TorporError as error:
        return f"the native core is not there: {error}"
    return ""


@functools.cache
def _why_not_torch() -> str:
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} cannot use the GPU: is it a build without CUDA?"


def device_bytes(pid: int | None = None, ordinal: int = 0) -> int:
    """What a process (this one) holds of a GPU, its context included, by NVML.

    Where NVML does not say it (no module, a container that hides processes), what is in use on the whole device: then
    only differences mean something, and neighbours must be still. ``per_process`` tells which.
    """
    found = _nvml_bytes(os.getpid() if pid is None else pid, ordinal)
    return _device_wide_bytes(ordinal) if found is None else found


def per_process(ordinal: int = 0) -> bool:
    """Whether ``device_bytes`` speaks of one process. Makes this process a context if it has none."""
    _device_wide_bytes(ordinal)
    return _nvml_bytes(os.getpid(), ordinal) is not None


def _nvml_bytes(pid: int, ordinal: int) -> int | None:
    handle = _nvml_handle(ordinal)
    if handle is None:
        return None
    import pynvml

    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    used = [p.usedGpuMemory for p in processes if p.pid == pid]
    return None if not used or None in used else sum(used)


@functools.cache
def _nvml_handle(ordinal: int) -> Any:
    """By UUID: NVML counts all GPUs of the machine, CUDA those that this process may see."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(gpus().uuids[ordinal])
    except (ImportError, OSError):
        return None
    except Exception as error:  # pynvml's errors have no common base before they are raised
        if type(error).__name__.startswith("NVMLError"):
            return None
        raise


def _device_wide_bytes(ordinal: int) -> int:
    import torch

    free, total = torch.cuda.mem_get_info(ordinal)
    return int(total - free)


# ---- a second process ------------------------------------------------------------------------------------------------------


class ChildDied(Exception):
    """The function raised, with its traceback, or its process ended without an answer."""


class Parent:
    """What a child's function gets first: the way to the test that started it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: Any) -> None:
        self._connection.send((True, value))

    def recv(self) -> Any:
        return self._connection.recv()

    def send_fds(self, fds: Sequence[int]) -> None:
        _send_fds(self._connection, fds)

    def recv_fds(self) -> list[int]:
        return _recv_fds(self._connection)


class Child:
    """``function(parent, *arguments)`` in a fresh interpreter. The function must lie in a module, and what is sent must pickle.

    >>> def reader(parent: Parent, nbytes: int) -> None:
    ...     [fd] = parent.recv_fds()
    ...     parent.send(read(fd, nbytes))
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the CUDA of its parent
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, value: Any) -> None:
        self._connection.send(value)

    def recv(self, timeout_s: float = WAIT_S) -> Any:
        """TimeoutError, ChildDied."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"process {self.pid} said nothing for {timeout_s:g} s")
        try:
            fine, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join(WAIT_S)
            raise ChildDied(f"process {self.pid} ended with {self.process.exitcode} and no answer") from error
        if not fine:
            raise ChildDied(value)
        return value

    def send_fds(self, fds: Sequence[int]) -> None:
        _send_fds(self._connection, fds)

    def recv_fds(self) -> list[int]:
        return _recv_fds(self._connection)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)

    def close(self, timeout_s: float = WAIT_S) -> None:
        """Waits for the function to return, which should wait for nothing more. Idempotent."""
        self._connection.close()
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.kill()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close() if kind is None else self.kill()


def _run(connection: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        function(Parent(connection), *arguments)
    except BaseException:
        with contextlib.suppress(OSError):  # the test is gone
            connection.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


@contextlib.contextmanager
def _socket(connection: Connection) -> Iterator[socket.socket]:
    """A pipe of both directions is a pair of Unix sockets."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        yield one


def _send_fds(connection: Connection, fds: Sequence[int]) -> None:
    with _socket(connection) as one:
        socket.send_fds(one, [len(fds).to_bytes(4, "little")], list(fds))


def _recv_fds(connection: Connection) -> list[int]:
    with _socket(connection) as one:
        message, fds, _, _ = socket.recv_fds(one, 4, 1024)
    if len(message) != 4 or int.from_bytes(message, "little") != len(fds):
        for fd in fds:
            os.close(fd)
        raise ChildDied(f"{len(fds)} descriptors came")
    return fds
