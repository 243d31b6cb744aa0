"""What this process has, by the kernel's account."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

from torpor.memory.procfs import open_memfds, pinned_bytes, read_mappings

_libc = ctypes.CDLL(None)


def vitals() -> dict[str, int]:
    gc.collect()
    memfds = {inode for _, inode in open_memfds(os.getpid())}
    devices = {device for device, _ in memfds}
    shared = [m for m in read_mappings() if m.permissions.endswith("s") and m.inode[0] in devices]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
        "pinned bytes": pinned_bytes(),
        "mapped bytes of memory files": sum(m.end - m.start for m in shared),
        "resident bytes": resident_bytes(),
    }


def resident_bytes() -> int:
    """Anonymous ones, without what the C library's allocator keeps of what was freed: megabytes, in steps, after an agent of
    UCX's."""
    if trim := getattr(_libc, "malloc_trim", None):
        trim(ctypes.c_size_t(0))
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))
