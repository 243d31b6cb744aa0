"""Regions of huge pages: what no other process may have is anonymous memory on the host driver, and all else is as with files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from torpor._native import Device, Op
from torpor.errors import BugError, TorporError
from torpor.memory import Memory, MemoryConfig, Residency
from torpor.memory.procfs import read_mappings, resident_bytes
from torpor.testing.driver import Fault, every_fault, nothing_leaks

MIB = 1 << 20
HUGE = 2 * MIB
NBYTES = 2 * HUGE + MIB  # three extents, the last too small for a huge page
CONFIG = MemoryConfig(extent_bytes=HUGE, chunk_bytes=MIB, copy_threads=2)


@pytest.fixture
def memory() -> Iterator[Memory]:
    with nothing_leaks(), Memory(CONFIG) as m:
        yield m


def filled(memory: Memory, tag: str, nbytes: int = NBYTES, **settings: bool) -> torch.Tensor:
    tensor = memory.pool(tag, **settings).empty(nbytes // 8, torch.int64)  # type: ignore[arg-type]
    return torch.arange(tensor.numel(), out=tensor)


def is_filled(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, torch.arange(tensor.numel()))


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def file_bytes(tensor: torch.Tensor) -> int:
    start, end = span(tensor)
    return sum(min(m.end, end) - max(m.start, start) for m in read_mappings() if m.inode[1] and m.start < end and m.end > start)


def test_a_sleep_gives_the_pages_back_and_a_wake_restores_the_bytes(memory: Memory) -> None:
    t = filled(memory, "weights")
    address = t.data_ptr()
    for _ in range(3):
        assert resident_bytes(*span(t)) == NBYTES
        report = memory.sleep()
        assert (report.unmapped_bytes, report.returned_bytes) == (NBYTES, NBYTES)
        assert {m.permissions for m in read_mappings() if m.start < address + NBYTES and m.end > address} == {"---p"}
        memory.check_integrity()
        memory.wake()
        memory.check_integrity()
        assert (t.data_ptr(), is_filled(t)) == (address, True)


def test_only_what_others_may_be_given_is_files(memory: Memory) -> None:
    plain, exported = filled(memory, "weights"), filled(memory, "kv_cache", exportable=True)
    guarded = filled(memory, "guarded", guarded=True)
    assert (file_bytes(plain), file_bytes(exported), file_bytes(guarded)) == (NBYTES - 2 * HUGE, NBYTES, NBYTES)
    with memory.exports("kv_cache") as exports:
        assert [len(region.fds) for region in exports.regions] == [3]
    memory.check_integrity()


def test_a_forked_child_holds_nothing_of_it(memory: Memory) -> None:
    t = filled(memory, "weights", 2 * HUGE)
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        os.read(ready, 1)  # until the parent is done or gone
        os._exit(0)
    try:
        os.close(ready)
        report = memory.sleep()
        assert (report.returned_bytes, report.tags[0].holders) == (2 * HUGE, ())
    finally:
        os.close(told)
        os.waitpid(pid, 0)
    memory.wake()
    assert is_filled(t)


def test_memory_where_a_region_sleeps_is_noticed(memory: Memory) -> None:
    t = filled(memory, "weights")
    memory.sleep()
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    page = ctypes.c_void_p(t.data_ptr() + HUGE), ctypes.c_size_t(4096)
    assert protect(*page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    with pytest.raises(BugError, match="asleep, yet the kernel maps memory there"):
        memory.check_integrity()
    assert protect(*page, 0) == 0
    memory.wake()
    assert protect(*page, mmap.PROT_READ) == 0
    with pytest.raises(BugError, match="does not map its"):
        memory.check_integrity()
    assert protect(*page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    memory.check_integrity()
    assert is_filled(t)


@pytest.mark.parametrize("count", [1, 10_000], ids=["once", "from then on"])
def test_m12_no_failure_loses_a_byte(count: int) -> None:
    struck: dict[str, int] = {}
    for fault in every_fault([Op.CREATE, Op.MAP, Op.SET_ACCESS, Op.UNMAP, Op.RELEASE, Op.COPY, Op.HASH], count=count):
        with nothing_leaks():
            struck[fault.op.name] = struck.get(fault.op.name, 0) + _cycle(fault)
    assert all(struck.values())
    assert struck["MAP"] >= 3  # one for each extent


def _cycle(fault: Fault) -> int:
    """A sleep, a wake and a clean sleep under the fault; then a wake without it. 1 if anything failed."""
    with Memory(CONFIG, device=fault.device) as memory:
        t = filled(memory, "weights")
        failures = 0
        with fault:
            for move in (memory.sleep, memory.wake, memory.sleep):
                with contextlib.suppress(TorporError):
                    move()
                    continue
                failures += 1
        memory.check_integrity()
        memory.wake()
        memory.check_integrity()
        assert memory.stats().tag("weights").residency is Residency.RESIDENT
        assert is_filled(t)
        del t
    return min(1, failures)


def test_a_device_made_for_files_and_anonymous_memory_counts_both(memory: Memory) -> None:
    device: Device = memory.device
    t = filled(memory, "weights")
    assert device.stats().mapped_bytes == NBYTES
    memory.sleep()
    assert (device.stats().mapped_bytes, device.stats().condemned_bytes) == (0, 0)
    memory.wake()
    assert t.numel()
