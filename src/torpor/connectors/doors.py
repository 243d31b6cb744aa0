"""Where peers meet: a Unix socket per engine (``ipc``) or a TCP port (``nixl``). A door only listens, checks who knocks, and
dials."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torpor.errors import ConfigurationError, HandshakeError, PeerError, TransportError

MAX_SOCKET_PATH_BYTES = 107  # sun_path, less the closing zero
FULL_NAP_S = 0.005
STALE_AFTER_S = 60.0  # a younger socket may be one that is bound and does not listen yet
_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of the process at the other end, from the kernel."""

    pid: int  # 0: not visible from this pid namespace
    uid: int
    started: int | None = None  # when the process began, which tells it from a later one with its pid


class Door(Protocol):
    """A listening socket."""

    def accept(self, timeout_s: float) -> tuple[socket.socket, Credentials | None] | None:
        """None when nobody came, or whoever came was turned away."""
        ...

    def close(self) -> None: ...


def peer_credentials(sock: socket.socket) -> Credentials:
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Credentials(pid, uid, start_time(pid))


def start_time(pid: int) -> int | None:
    """Clock ticks since boot; None when there is no such process, or only its remains. OSError when we cannot look."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # of this process or machine, and no news of that one
            raise
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def check_same_user(credentials: Credentials) -> None:
    """HandshakeError unless the peer runs as the user we run as: descriptors of the KV cache go to nobody else."""
    if credentials.uid != os.geteuid():
        raise HandshakeError(
            f"pid {credentials.pid} runs as uid {credentials.uid}, we as {os.geteuid()}", peer=f"pid {credentials.pid}"
        )


def default_socket_dir() -> Path:
    """``/run/user/<uid>/torpor`` where the system made a run-time folder for this user, else ``/tmp/torpor-<uid>``."""
    uid = os.geteuid()
    run = Path(f"/run/user/{uid}")
    return run / "torpor" if run.is_dir() and os.access(run, os.W_OK) else Path(f"/tmp/torpor-{uid}")


def socket_path(folder: Path, engine_id: str) -> Path:
    """Found from the engine id alone, so that a request cannot name a path. ConfigurationError when it is too long for a
    socket."""
    path = folder / f"{hashlib.sha256(engine_id.encode()).hexdigest()[:16]}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"socket_dir {str(folder)!r} is too long: a socket path may have {MAX_SOCKET_PATH_BYTES} bytes",
            setting="socket_dir",
            value=str(folder),
        )
    return path


def make_private_folder(folder: Path) -> None:
    """A folder that only we can enter. ConfigurationError when it cannot be made, or somebody else's is in its place."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"socket_dir {str(folder)!r} cannot be made: {error.strerror}; name a folder of ours with the option socket_dir",
            setting="socket_dir",
            value=str(folder),
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(
            f"socket_dir {str(folder)!r} must be a folder of ours with mode 0700; it is uid {found.st_uid}'s, "
            f"mode {stat.S_IMODE(found.st_mode):o}",
            setting="socket_dir",
            value=str(folder),
        )


def remove_stale_sockets(folder: Path) -> None:
    """Those that killed engines left: an engine's name is new with every start, so nobody would ever take their place."""
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError):
            old = time.time() - path.lstat().st_mtime > STALE_AFTER_S
            if old and not _answers(path):
                path.unlink()


class UnixDoor:
    """Listens on a Unix socket of mode 0600 in a folder of mode 0700."""

    def __init__(self, path: Path, *, check: Callable[[Credentials], None] = check_same_user) -> None:
        make_private_folder(path.parent)
        remove_stale_sockets(path.parent)
        self._path = path
        self._check = check
        self._sock = _bind_unix(path)
        self._inode = path.lstat().st_ino

    def accept(self, timeout_s: float) -> tuple[socket.socket, Credentials] | None:
        sock = _accept(self._sock, timeout_s)
        if sock is None:
            return None
        try:
            credentials = peer_credentials(sock)
            self._check(credentials)
        except (HandshakeError, OSError):
            sock.close()
            return None
        return sock, credentials

    def close(self) -> None:
        """Idempotent. Removes the socket file unless another engine has put its own there."""
        if self._sock.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        self._sock.close()


class TcpDoor:
    """Listens on ``host``; ``port`` 0 takes any free one."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64)
        except OSError as error:
            setting = "kv_port" if error.errno == errno.EADDRINUSE else "kv_host"
            raise ConfigurationError(
                f"cannot listen for peers on kv_host {host!r}, kv_port {port}: {error.strerror or error}",
                setting=setting,
                value=port,
            ) from error
        self._sock.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    def accept(self, timeout_s: float) -> tuple[socket.socket, None] | None:
        sock = _accept(self._sock, timeout_s)
        if sock is None:
            return None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, None

    def close(self) -> None:
        self._sock.close()


def dial_unix(path: Path, who: str, timeout_s: float, *, check: Callable[[Credentials], None] = check_same_user) -> socket.socket:
    """PeerError when nobody listens there, HandshakeError when it is somebody else's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        _connect_unix(sock, path, who, timeout_s)
        check(peer_credentials(sock))
    except OSError as error:
        sock.close()
        raise PeerError(
            f"{who} is not at {path}: {error.strerror or error} (is it up, and is its socket_dir ours?)", peer=who
        ) from error
    except PeerError:  # a HandshakeError too
        sock.close()
        raise
    return sock


def _connect_unix(sock: socket.socket, path: Path, who: str, timeout_s: float) -> None:
    """OSError, PeerError. Where the listener's queue is full, a Unix socket with a time limit is refused at once (EAGAIN) and not
    when the limit has passed: whoever knocks a thousand times would keep everybody out."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return sock.connect(os.fspath(path))
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise PeerError(
                    f"{who} has not taken a connection within {timeout_s:g} s (connect_timeout_s): too many wait at {path}",
                    peer=who,
                ) from error
            time.sleep(FULL_NAP_S)


def dial_tcp(host: str, port: int, who: str, timeout_s: float) -> socket.socket:
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except (OSError, UnicodeError) as error:
        raise PeerError(
            f"{who} cannot be reached at {host}:{port}: {getattr(error, 'strerror', None) or error}", peer=who
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _accept(listener: socket.socket, timeout_s: float) -> socket.socket | None:
    """None when nobody came. TransportError when the listener itself is broken."""
    if listener.fileno() < 0:
        raise TransportError("the listener is closed", transport="control channel")
    poller = select.poll()
    poller.register(listener.fileno(), select.POLLIN)
    if not poller.poll(timeout_s * 1000):
        return None
    try:
        return listener.accept()[0]
    except (BlockingIOError, ConnectionError):
        return None
    except OSError as error:
        raise TransportError(f"cannot accept a connection: {error.strerror or error}", transport="control channel") from error


def _bind_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(os.fspath(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"cannot listen at {path}: {error.strerror or error}; name a folder of ours with the option socket_dir",
                    setting="socket_dir",
                    value=str(path.parent),
                ) from error
            if _answers(path):
                raise ConfigurationError(
                    f"another engine with this kv engine_id listens at {path}: give each engine its own",
                    setting="engine_id",
                    value=str(path),
                ) from error
            path.unlink(missing_ok=True)
            sock.bind(os.fspath(path))
        path.chmod(0o600)
        sock.listen(64)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _answers(path: Path) -> bool:
    """Whether a living process listens there; a file that a dead one left refuses connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return path.exists()
        return True
