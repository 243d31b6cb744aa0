"""What the kernel says of our memory, read here from ``smaps`` and ``/proc/self/fd`` and not with the product's own readers."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

SETTLE_S = 5.0
Range = tuple[int, int]  # [start, end)
EXTENT = "/memfd:torpor (deleted)"
_HEAD = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)$", re.MULTILINE)
_RSS = re.compile(rb"^Rss: +(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Area:
    start: int
    end: int
    permissions: str
    path: str
    rss_bytes: int


def areas_in(ranges: Sequence[Range], *, rss: bool) -> list[Area]:
    """Of ``/proc/self/smaps``, those that touch a range. Without ``rss`` of ``/proc/self/maps``, which is far quicker."""
    with open("/proc/self/smaps" if rss else "/proc/self/maps", "rb") as file:
        text = file.read()
    found = []
    for head in _HEAD.finditer(text):
        start, end = int(head[1], 16), int(head[2], 16)
        if any(start < high and end > low for low, high in ranges):
            size = _RSS.search(text, head.end()) if rss else None
            found.append(Area(start, end, head[3].decode(), head[4].decode(), int(size[1]) << 10 if size else 0))
    return found


def mapped_bytes(areas: Sequence[Area], ranges: Sequence[Range]) -> int:
    """Of the ranges, what extents are mapped into, shared and writable."""
    files = [a for a in areas if a.path == EXTENT and a.permissions == "rw-s"]
    return sum(max(0, min(a.end, high) - max(a.start, low)) for a in files for low, high in ranges)


def resident_elsewhere_bytes(areas: Sequence[Area], ranges: Sequence[Range]) -> int:
    """Pages in the ranges that are no extent's: an asleep range has none, also where it is guarded by zero pages."""
    inside = [a for a in areas if any(low <= a.start and a.end <= high for low, high in ranges)]
    return sum(a.rss_bytes for a in inside if a.path != EXTENT)


def extent_bytes_alive() -> int:
    """Memory files of extents that this process has open or mapped: physical memory, each file counted once."""
    sizes: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == EXTENT:
                status = os.stat(f"/proc/self/fd/{name}")
                sizes[status.st_ino] = status.st_size
    with open("/proc/self/maps", "rb") as file:
        mapped = [line.split(maxsplit=5) for line in file if line.rstrip().endswith(EXTENT.encode())]
    pieces: dict[int, set[Range]] = {}
    for span, _, offset, _, inode, _ in mapped:
        start, end = (int(x, 16) for x in span.split(b"-"))
        pieces.setdefault(int(inode), set()).add((int(offset, 16), int(offset, 16) + end - start))
    for inode, parts in pieces.items():
        sizes.setdefault(inode, max(high for _, high in parts) - min(low for low, _ in parts))
    return sum(sizes.values())


@dataclass(frozen=True)
class Footprint:
    descriptors: int
    threads: int
    extent_bytes: int

    @classmethod
    def now(cls) -> Footprint:
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            extent_bytes=extent_bytes_alive(),
        )

    def check_back(self, descriptors: int = 0) -> None:
        """AssertionError when the process has more than it had, and that many descriptors. Threads that were told to end may take
        a moment."""
        deadline = time.monotonic() + SETTLE_S
        allowed = replace(self, descriptors=self.descriptors + descriptors)
        while (grown := allowed._grown()) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert not grown, f"leaked: {grown}"

    def _grown(self) -> str:
        now = Footprint.now()
        pairs = {f.name: (getattr(self, f.name), getattr(now, f.name)) for f in fields(self)}
        return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in pairs.items() if new > old)
