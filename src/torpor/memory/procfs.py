"""What the kernel says about memory: mappings, descriptors, pins, and how many cores there are."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

Inode = tuple[int, int]  # st_dev, st_ino


@dataclass(frozen=True, slots=True)
class Mapping:
    start: int
    end: int
    permissions: str  # "rw-s"
    inode: Inode  # (0, 0): anonymous


def read_mappings(pid: int | str = "self") -> list[Mapping]:
    """By address. OSError when the process is gone or not ours to see."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        return [_mapping(line) for line in file]


def _mapping(line: str) -> Mapping:
    span, permissions, _offset, device, inode = line.split(maxsplit=5)[:5]
    start, end = (int(x, 16) for x in span.split("-"))
    major, minor = (int(x, 16) for x in device.split(":"))
    return Mapping(start, end, permissions, (os.makedev(major, minor) if int(inode) else 0, int(inode)))


def open_memfds(pid: int) -> Iterator[tuple[int, Inode]]:
    """(descriptor, inode) of every memfd that the process has open. OSError as in ``read_mappings``."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            path = f"/proc/{pid}/fd/{name}"
            if os.readlink(path).startswith("/memfd:"):
                status = os.stat(path)
                yield int(name), (status.st_dev, status.st_ino)


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_parent=_count_fork)


def fork_count() -> int:
    """How often this process was forked without exec: such a child has every descriptor, and so every memory file, of ours."""
    return _forks


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "gone"


def pinned_bytes(pid: int | str = "self") -> int:
    """VmPin: pages that drivers hold for long-term direct access, whatever is mapped. Shmem and Rss do not show them."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("VmPin:"):
                return int(line.split()[1]) << 10
    return 0


def resident_bytes(start: int, end: int) -> int:
    """Rss of the mappings that lie in [start, end)."""
    total, inside = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(x, 16) for x in head.split("-"))
                inside = start <= low and high <= end
            elif inside and head == "Rss:":
                total += int(line.split()[1]) << 10
    return total


def host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores() -> int:
    """What affinity and the cgroup's quota leave to this process."""
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, math.floor(min(cores, _cgroup_quota())))


def _cgroup_quota() -> float:
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        with contextlib.suppress(OSError, ValueError):
            words = _read(quota_file).split() + (_read(period_file).split() if period_file else [])
            if words[0] not in ("max", "-1"):
                return int(words[0]) / int(words[1])
    return math.inf


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
