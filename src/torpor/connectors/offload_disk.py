"""The second place of ``offload``: one file a block in a folder of one engine's own. A file is believed when its size, its header
and the digest over its content are right; everything else is a miss, and removed.

    <disk_dir>/lock                     held by the engine that uses the folder
    <disk_dir>/kv-<16 hex digits>/      of one version of the weights and one layout
        <64 hex digits>.block           the block of that name: header, content
        <64 hex digits>.part            being written; what a killed engine left is removed by the next

Nothing is synced: a file that a crash of the machine cut off does not match its digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from torpor.errors import ConfigurationError

logger = logging.getLogger(__name__)

MAGIC = b"torporKV\x00\x00\x00\x01"
DIGEST_BYTES = 32
HEADER_BYTES = len(MAGIC) + 8 + 2 * DIGEST_BYTES  # magic, content's size, name, digest
_FOLDER = re.compile(r"kv-[0-9a-f]{16}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.block")
_PART = re.compile(r"[0-9a-f]{64}\.part")


def digest_of(name: bytes, content: memoryview | bytes) -> bytes:
    """Over the name too: a block under another block's name does not match."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=name).digest()


class DiskShelf:
    """Thread-safe: one may write while another reads. ``use`` waits for a write under way."""

    def __init__(self, folder: Path, limit_bytes: int, block_bytes: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self.file_bytes = HEADER_BYTES + block_bytes
        self.limit = limit_bytes // self.file_bytes  # files
        self._present: Path
        self._lock_file = -1
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._files: OrderedDict[bytes, None] = OrderedDict()
        self._failing = False
        self.evicted = self.errors = self.bad = self.leftovers = 0

    def open(self, root: bytes) -> None:
        """Takes the folder, and takes stock. ConfigurationError when it is another engine's or cannot be used."""
        _private_folder(self._folder)
        self._lock_file = _take(self._folder)
        try:
            self.use(root)
        except BaseException:
            self.close()
            raise

    def use(self, root: bytes) -> None:
        """From now on blocks of this root alone: files of every other are removed."""
        with self._writing:
            with self._lock:
                self._files.clear()
            self._present = self._folder / f"kv-{root.hex()[:16]}"
            try:
                for other in self._folder.iterdir():
                    if other != self._present and _FOLDER.fullmatch(other.name) and not other.is_symlink():
                        self._remove_folder(other)
                self._present.mkdir(mode=0o700, exist_ok=True)
                self._take_stock()
            except OSError as error:
                raise _unusable(self._folder, error) from error

    def _remove_folder(self, folder: Path) -> None:
        """With what is ours in it; what is not stays, and the folder with it."""
        for path in folder.iterdir():
            if _BLOCK.fullmatch(path.name) or _PART.fullmatch(path.name):
                self.leftovers += self._unlink(path)
        with contextlib.suppress(OSError):
            folder.rmdir()

    def __contains__(self, name: bytes) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    @property
    def used_bytes(self) -> int:
        return len(self._files) * self.file_bytes

    def write(self, name: bytes, content: memoryview) -> bool:
        """False when it could not be kept: counted, and logged when it begins to fail."""
        with self._writing:
            return name not in self._files and self._make_room() and self._write(name, content)

    def _write(self, name: bytes, content: memoryview) -> bool:
        part = self._part(name)
        try:
            self._present.mkdir(mode=0o700, exist_ok=True)  # somebody made room by hand, or it was away during an update
            _write_new(part, (_header(name, content), content))
            os.rename(part, self._path(name))
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._failed("write", part, error)
            return False
        with self._lock:
            self._files[name] = None
        if self._failing:
            self._failing = False
            logger.info("KV blocks can be written to %s again", self._folder)
        return True

    def read(self, name: bytes, into: memoryview) -> bool:
        """False when it is not there, or not what it must be; then it is forgotten."""
        try:
            found = _read_whole(self._path(name), self.file_bytes)
        except FileNotFoundError:  # given up meanwhile
            self._forget(name)
            return False
        except OSError as error:
            self._forget(name)
            self._failed("read", self._path(name), error)
            return False
        content = memoryview(found)[HEADER_BYTES:]
        if len(found) != self.file_bytes or found[:HEADER_BYTES] != _header(name, content):
            self._discard(name)
            return False
        into[:] = content
        return True

    def touch(self, names: Sequence[bytes]) -> None:
        """As ``HostShelf.touch``. The files' times are what a later engine sees of it."""
        for name in reversed(names):
            with self._lock:
                if name not in self._files:
                    continue
                self._files.move_to_end(name)
            with contextlib.suppress(OSError):
                os.utime(self._path(name))

    def close(self) -> None:
        """Idempotent. The files stay."""
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _take_stock(self) -> None:
        """The oldest first; what is no block's whole file goes."""
        found: list[tuple[float, bytes]] = []
        with os.scandir(self._present) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                whole = stat.S_ISREG(status.st_mode) and status.st_size == self.file_bytes
                if whole and _BLOCK.fullmatch(entry.name):
                    found.append((status.st_mtime, bytes.fromhex(entry.name[:64])))
                elif _PART.fullmatch(entry.name) or _BLOCK.fullmatch(entry.name):
                    self.leftovers += bool(_PART.fullmatch(entry.name))
                    self.bad += bool(_BLOCK.fullmatch(entry.name))
                    self._unlink(Path(entry.path))
        with self._lock:
            self._files.update((name, None) for _, name in sorted(found))
        self._make_room(0)
        if self.leftovers or self.bad:
            logger.warning("%s: %d leftovers and %d bad files were removed", self._folder, self.leftovers, self.bad)

    def _make_room(self, wanted: int = 1) -> bool:
        while len(self._files) > self.limit - wanted:
            with self._lock:
                if not self._files:
                    return False
                oldest, _ = self._files.popitem(last=False)
            if not self._unlink(self._path(oldest)):
                with self._lock:
                    self._files[oldest] = None
                    self._files.move_to_end(oldest, last=False)
                return False
            self.evicted += 1
        return True

    def _discard(self, name: bytes) -> None:
        self.bad += 1
        logger.warning("%s is not the KV block that it should be: it is removed", self._path(name))
        self._forget(name)
        self._unlink(self._path(name))

    def _forget(self, name: bytes) -> None:
        with self._lock:
            self._files.pop(name, None)

    def _unlink(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._failed("remove", path, error)
            return False
        return True

    def _failed(self, what: str, path: Path, error: OSError) -> None:
        """Counted each time; told when it begins."""
        self.errors += 1
        if not self._failing:
            self._failing = True
            logger.error("KV blocks are not kept on disk: cannot %s %s: %s", what, path, error.strerror or error)

    def _path(self, name: bytes) -> Path:
        return self._present / f"{name.hex()}.block"

    def _part(self, name: bytes) -> Path:
        return self._present / f"{name.hex()}.part"


def _header(name: bytes, content: memoryview) -> bytes:
    return MAGIC + content.nbytes.to_bytes(8, "little") + name + digest_of(name, content)


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise _unusable(folder, error) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigurationError(
            f"disk_dir {str(folder)!r} must be a folder of ours that nobody else can write to; it is uid {found.st_uid}'s, "
            f"mode {stat.S_IMODE(found.st_mode):o}",
            setting="disk_dir",
            value=str(folder),
        )


def _take(folder: Path) -> int:
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigurationError(
            f"disk_dir {str(folder)!r} is in use by another engine: give each engine a folder of its own",
            setting="disk_dir",
            value=str(folder),
        ) from error
    return fd


def _unusable(folder: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"disk_dir {str(folder)!r} cannot be used: {error.strerror or error}", setting="disk_dir", value=str(folder)
    )


def _write_new(path: Path, parts: tuple[bytes | memoryview, ...]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]


def _read_whole(path: Path, expected: int) -> bytes:
    """At most one byte more than expected: a longer file is a wrong one."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", buffering=0) as file:
        parts = []
        while expected + 1 > 0 and (part := file.read(expected + 1)):
            parts.append(part)
            expected -= len(part)
    return b"".join(parts)
