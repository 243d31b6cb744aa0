"""What a process holds, as the kernel sees it, and whether that stayed flat."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torpor.memory.procfs import open_memfds, pinned_bytes, read_mappings

PAGE = os.sysconf("SC_PAGE_SIZE")
# What comes and goes without anybody's leaking it: free lists of the allocator and of the interpreter.
SLACK_BYTES = 1 << 20
SLACK_MAPPINGS = 16
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    cycle: int
    rss_bytes: int
    pss_bytes: int  # depends on who else has the same libraries loaded: shown, not judged
    anonymous_bytes: int
    shmem_bytes: int  # memfd pages mapped here
    memfd_bytes: int  # pages of the memfds that are open here, mapped or not
    pinned_bytes: int
    arena_bytes: int  # committed for host images, by the engines' own account
    device_bytes: int  # mapped by the pools, by the engines' own account
    descriptors: int
    mappings: int
    threads: int

    def __str__(self) -> str:
        mib = {f.name: getattr(self, f.name) / (1 << 20) for f in dataclasses.fields(self) if f.name.endswith("_bytes")}
        sizes = "  ".join(f"{name.removesuffix('_bytes')} {value:.2f}" for name, value in mib.items())
        return f"cycle {self.cycle:5}  MiB: {sizes}  fds {self.descriptors}  maps {self.mappings}  threads {self.threads}"


def measure(cycle: int, engines: Sequence[dict[str, Any]]) -> Footprint:
    """``engines``: fresh stats of the idle engines of this process."""
    gc.collect()
    _libc.malloc_trim(0)
    rollup = _rollup()
    return Footprint(
        cycle=cycle,
        rss_bytes=rollup["Rss"],
        pss_bytes=rollup["Pss"],
        anonymous_bytes=rollup["Anonymous"],
        shmem_bytes=rollup["Pss_Shmem"],
        memfd_bytes=sum(_allocated(fd) for fd in {inode: fd for fd, inode in open_memfds(os.getpid())}.values()),
        pinned_bytes=pinned_bytes(),
        arena_bytes=sum(stats["memory"]["host_committed_bytes"] for stats in engines),
        device_bytes=sum(stats["memory"]["mapped_bytes"] for stats in engines),
        descriptors=len(os.listdir("/proc/self/fd")),
        mappings=len(read_mappings()),
        threads=len(os.listdir("/proc/self/task")),
    )


async def observe(run_to: Callable[[int], Awaitable[Footprint]], cycles: int, rounds: int) -> list[Footprint]:
    """Looks after a tenth, a half and all of ``cycles``. While the process grew over the last three looks it goes on, half as
    many cycles a round, ``rounds`` at most: what is reached for the first time and free lists that fill cost a megabyte or so in
    the first twenty cycles of a pair, and end; a leak does not end."""
    figures = [await run_to(mark) for mark in sorted({max(1, cycles // 10), cycles // 2, cycles})]
    for _ in range(rounds):
        if not any(grew(before, figures[-1]) for before in figures[-3:-1]):
            break
        figures.append(await run_to(figures[-1].cycle + (cycles + 1) // 2))
    return figures


def check_all(figures: Sequence[Footprint]) -> None:
    """What engines hold is the same at every look; the process did not grow over the last three."""
    for before in figures[-3:-1]:
        check_flat(before, figures[-1])
    for before, after in itertools.pairwise(figures):
        check_held(before, after)


def grew(before: Footprint, after: Footprint) -> str:
    """What grew by a page per cycle or more, in words; empty if nothing did."""
    cycles = after.cycle - before.cycle
    allowed = max(SLACK_BYTES, cycles * PAGE)
    growth = {name: getattr(after, name) - getattr(before, name) for name in ("rss_bytes", "anonymous_bytes")}
    return ", ".join(f"{name} grew by {n} in {cycles} cycles, {allowed} are allowed" for name, n in growth.items() if n > allowed)


def check_flat(before: Footprint, after: Footprint) -> None:
    """Fails for a leak of one page per cycle."""
    assert not grew(before, after), f"{grew(before, after)}:\n{before}\n{after}"
    check_held(before, after)


def check_held(before: Footprint, after: Footprint) -> None:
    """Pools, pins, images, descriptors and threads are the same to the byte: they belong to the engines alone."""
    for name in ("shmem_bytes", "memfd_bytes", "pinned_bytes", "arena_bytes", "device_bytes", "descriptors", "threads"):
        assert getattr(after, name) <= getattr(before, name), f"{name} grew:\n{before}\n{after}"
    assert after.mappings <= before.mappings + SLACK_MAPPINGS, f"mappings grew:\n{before}\n{after}"


def _rollup() -> dict[str, int]:
    with open("/proc/self/smaps_rollup", encoding="ascii", errors="replace") as file:
        lines = [line.split() for line in file if line.endswith("kB\n")]
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}


def _allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512
