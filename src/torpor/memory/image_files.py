"""Memory files that hold pieces of host images, and how the engines of one host find each other's.

The kernel keeps the register. A piece is a memfd whose name says what is in it and which nobody can change any more; whoever has
one open is found under /proc. So nothing has to be cleaned up, whoever dies and how, and a piece goes with the last who uses it.
The kernel lets a process open the files of its own user's processes only, those it could trace; it must see them: one PID
namespace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass

from torpor.memory.procfs import processes

_PREFIX = "torpor-image-"
_WRITE_BYTES = 8 << 20
# Of Linux's fcntl.h; Python's fcntl has them by these names too, but not in every build.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1, 2, 4, 8
_SEALS = _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE


@dataclass(frozen=True, slots=True)
class Found:
    """A file that a process has open."""

    pid: int
    descriptor: int


def make_file(key: str, nbytes: int) -> int:
    """An empty file that others take for unfinished until it is sealed. Its descriptor is the caller's. OSError."""
    descriptor = os.memfd_create(_PREFIX + key, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of it. By write(2), which gives a file its pages without clearing them first. OSError."""
    done = 0
    while done < len(data):
        written = os.pwrite(descriptor, data[done : done + _WRITE_BYTES], offset + done)
        if written == 0:
            raise OSError(errno.ENOSPC, "a memory file takes no more")
        done += written


def seal_file(descriptor: int) -> int:
    """Nobody can change it from now on. Gives a descriptor for reading, the caller's; the other stays the caller's too. OSError.

    Before Linux 6.7 a sealed file cannot be mapped through a descriptor that may write."""
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS | _SEAL_SEAL)
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def find_files(keys: Collection[str]) -> dict[str, list[Found]]:
    """Who has files of these names open, finished or not; this process too. OSError where there is no /proc."""
    wanted = {f"/memfd:{_PREFIX}{key} (deleted)": key for key in keys}
    found: dict[str, list[Found]] = {}
    for pid in processes():
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look into
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                for descriptor, key in _files_of(pid, wanted):
                    found.setdefault(key, []).append(Found(pid, descriptor))
    return found


def _files_of(pid: int, wanted: dict[str, str]) -> list[tuple[int, str]]:
    out = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            key = wanted.get(os.readlink(f"/proc/{pid}/fd/{name}"))
            if key is not None:
                out.append((int(name), key))
    return out


def open_found(found: Found, nbytes: int) -> int | None:
    """A descriptor for reading, the caller's; None when it is gone, is not finished, or is not what a piece looks like. What is
    in it is for the caller to check: names are only words."""
    try:
        descriptor = os.open(f"/proc/{found.pid}/fd/{found.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        ours = status.st_uid == os.geteuid() and status.st_size == nbytes
        if ours and fcntl.fcntl(descriptor, _GET_SEALS) & _SEALS == _SEALS:
            return descriptor
    except OSError:
        pass  # no memory file: the descriptor's number means another file by now
    os.close(descriptor)
    return None


class Turn:
    """Whose turn it is to make an image's files: one process's at a time, and never a dead one's. A name among the abstract
    sockets of the network namespace: the kernel takes it back from whoever ends, and nothing is left of it."""

    def __init__(self, key: str) -> None:
        self._name = f"\0{_PREFIX}{os.geteuid()}-{key}"
        self._socket: socket.socket | None = None

    def take(self) -> bool:
        """Is it ours now? Does not wait. OSError where there are no such sockets."""
        if self._socket is None:
            taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                taken.bind(self._name)
            except OSError as error:
                taken.close()
                if error.errno == errno.EADDRINUSE:
                    return False
                raise
            self._socket = taken
        return True

    def close(self) -> None:
        """Idempotent. It is the next one's turn."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def why_impossible() -> str:
    """What keeps this machine from sharing images, for people; "" when nothing does. Makes a small file and looks for it."""
    try:
        key = f"probe-{os.getpid()}"
        with contextlib.ExitStack() as undo:
            turn = Turn(key)
            undo.callback(turn.close)
            turn.take()
            descriptor = make_file(key, 1)
            undo.callback(os.close, descriptor)
            undo.callback(os.close, seal_file(descriptor))
            found = find_files([key]).get(key, [])
            opened = next((fd for f in found if (fd := open_found(f, 1)) is not None), None)
            if opened is None:
                return "memory files of this process are not found under /proc"
            undo.callback(os.close, opened)
    except OSError as error:
        return f"memory files that are sealed and found under /proc are needed: {error}"
    return ""
