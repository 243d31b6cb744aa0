"""What this process may use of the machine: cores, memory, and whether its cores compute in bfloat16.

Limits of cgroups (both versions) are those of the process's own group and of every group above it: the smallest holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16", "svebf16"})  # x86, then Arm
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a huge number


def usable_cores(root: Path = _ROOT) -> int:
    """Cores this process may run on: its affinity, cut to the CPU quota. At least 1."""
    cores = len(os.sched_getaffinity(0))
    quotas = [q for group in _groups(root, "cpu") if (q := _cpu_quota(group)) is not None]
    return max(1, min([cores, *(int(q) for q in quotas)]))


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Host memory to be had without swapping: MemAvailable, cut to what the memory cgroups have left."""
    left = [b for group in _groups(root, "memory") if (b := _memory_left(group)) is not None]
    return max(0, min([_meminfo_available(root), *left]))


def is_amd(root: Path = _ROOT) -> bool:
    """Whether the cores are AMD's: MKL is Intel's, and chooses among its kernels by the vendor."""
    return "AuthenticAMD" in (_read(root / "proc/cpuinfo") or "")


def has_bf16_units(root: Path = _ROOT) -> bool:
    """True when the cores multiply bfloat16 themselves; elsewhere it is emulated and slower than float32."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BF16_FLAGS.isdisjoint(flags.split())
    return False


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders that may limit this process, own group first. In a container the path may not exist: its root does."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers == "":
            base = mount
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        own = base / path.strip("/")
        yield from (folder for folder in (own, *own.parents) if folder == base or base in folder.parents)


def _cpu_quota(group: Path) -> float | None:
    text = _read(group / "cpu.max")
    if text is not None:
        quota, period = text.split()[:2]
        return None if quota == "max" else float(quota) / float(period)
    quota_us, period_us = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if quota_us is None or period_us is None or int(quota_us) <= 0:
        return None
    return int(quota_us) / int(period_us)


def _meminfo_available(root: Path) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_left(group: Path) -> int | None:
    for limit_name, used_name, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(group / limit_name), _read(group / used_name)
        if limit is None or used is None or limit.strip() == "max" or int(limit) >= _UNLIMITED:
            continue
        return int(limit) - int(used) + _stat(group, cache)
    return None


def _stat(group: Path, name: str) -> int:
    """Page cache counts as used memory of a group, and is given back on demand."""
    fields = dict(line.split() for line in (_read(group / "memory.stat") or "").splitlines())
    return int(fields.get(name, 0))
