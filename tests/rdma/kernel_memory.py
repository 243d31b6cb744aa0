"""What the kernel says of memory that a device may reach."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

MIB = 1 << 20


def used_bytes() -> int:
    """Memory in use on this machine: pages that are pinned and mapped nowhere are in no other count of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    reclaimable = kib["Buffers"] + kib["Cached"] - kib["Shmem"] + kib["SReclaimable"]
    return (kib["MemTotal"] - kib["MemFree"] - reclaimable) << 10


def memory_regions(pid: int, at_least: int) -> list[int]:
    """Bytes of every memory region that the kernel's RDMA core holds for a process."""
    shown = subprocess.run(["rdma", "-j", "-d", "resource", "show", "mr"], capture_output=True, text=True, timeout=30, check=True)
    found = json.loads(shown.stdout or "[]")
    return [int(mr["mrlen"]) for mr in found if mr.get("pid") == pid and int(mr.get("mrlen", 0)) >= at_least]
