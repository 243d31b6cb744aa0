"""The root of the machine: busybox, the modules, an init, and the few files of /etc that libraries ask for."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from kernel import Kernel

HERE = Path(__file__).parent
FOLDERS = ["boot", "boot/modules", "dev", "etc", "job", "proc", "root", "run", "sys", "tmp", "usr", "var", "var/tmp", "home"]
FROM_USR = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"]
FROM_ETC = ["ld.so.cache", "passwd", "group", "nsswitch.conf", "protocols", "services", "localtime"]
ETC_TREES = ["libibverbs.d", "alternatives"]
HOSTS = b"127.0.0.1 localhost rdma-vm\n10.99.0.1 rxe0\n"


def build_initramfs(kernel: Kernel) -> bytes:
    """A cpio archive in the "new ASCII" format, which the kernel reads without unpacking it first."""
    archive = bytearray()
    for number, (name, mode, content) in enumerate(entries(kernel), start=1):
        archive += record(number, name, mode, content)
    archive += record(0, "TRAILER!!!", 0, b"")
    return bytes(archive)


def entries(kernel: Kernel) -> Iterator[tuple[str, int, bytes]]:
    """(path, mode, content or target) each, folders before what is in them."""
    for name in FOLDERS:
        yield name, stat.S_IFDIR | (0o1777 if name.endswith("tmp") else 0o755), b""
    yield "init", stat.S_IFREG | 0o755, (HERE / "guest_init.sh").read_bytes()
    yield "boot/busybox", stat.S_IFREG | 0o755, Path("/bin/busybox").read_bytes()
    yield "boot/sh", stat.S_IFLNK | 0o777, b"busybox"
    yield "boot/order", stat.S_IFREG | 0o644, "".join(f"{name}\n" for name in kernel.modules).encode()
    for name in kernel.modules:
        yield f"boot/modules/{name}.ko", stat.S_IFREG | 0o644, (kernel.folder / f"{name}.ko").read_bytes()
    for name in FROM_USR:
        if Path("/usr", name).exists():
            yield name, stat.S_IFLNK | 0o777, f"usr/{name}".encode()
    yield "etc/hosts", stat.S_IFREG | 0o644, HOSTS
    for name in FROM_ETC:
        if Path("/etc", name).exists():
            yield f"etc/{name}", stat.S_IFREG | 0o644, Path("/etc", name).read_bytes()
    for name in ETC_TREES:
        yield from tree(Path("/etc", name))


def tree(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    if not folder.is_dir():
        return
    yield str(folder)[1:], stat.S_IFDIR | 0o755, b""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            yield str(path)[1:], stat.S_IFLNK | 0o777, str(path.readlink()).encode()
        elif path.is_file():
            yield str(path)[1:], stat.S_IFREG | 0o644, path.read_bytes()


def record(inode: int, name: str, mode: int, content: bytes) -> bytes:
    """Header, name and content, each padded to four bytes. All of it is root's; times and devices are 0."""
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return padded(header + name.encode() + b"\0") + padded(content)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
