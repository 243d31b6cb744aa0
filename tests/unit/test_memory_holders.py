"""M11 (what the device really got back, and who holds the rest), exports and their ledger, P4 (late reads), P4a (pins)."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from leftovers import no_descriptors_left

from torpor._native import Device, Op
from torpor.errors import ConfigurationError, DeviceError, StateError, UnknownTagError
from torpor.memory import Holder, Memory, MemoryConfig
from torpor.memory.procfs import pinned_bytes, read_mappings, resident_bytes
from torpor.testing.driver import Fault
from torpor.testing.pinned import PinnedRegistration, pinning_is_permitted

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)
KV = {"kv_cache": "discard"}

needs_pinning = pytest.mark.skipif(not pinning_is_permitted(), reason="io_uring is not permitted here")


def kv_cache(memory: Memory, nbytes: int = 2 * MIB, value: int = 0x11, guarded: bool = False) -> torch.Tensor:
    pool = memory.pool("kv_cache", policy="discard", exportable=True, guarded=guarded)
    return pool.empty(nbytes, torch.uint8).fill_(value)


class Peer:
    """Another process that was handed descriptors: it maps them or only keeps them, reads when asked, lets go when told."""

    # Plain mmap(2): Python's own keeps a descriptor open besides the mapping.
    SCRIPT = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
maps = []
for fd in map(int, sys.argv[2:]):
    if sys.argv[1] == "map":
        maps.append(libc.mmap(None, os.fstat(fd).st_size, 3, 1, fd, 0))
        os.close(fd)
print("ready", flush=True)
for line in sys.stdin:
    print(ctypes.string_at(maps[0], 1)[0], flush=True)
"""

    def __init__(self, fds: tuple[int, ...], how: str = "map") -> None:
        command = [sys.executable, "-S", "-c", self.SCRIPT, how, *map(str, fds)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds)
        assert self._line() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def first_byte(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        return int(self._line())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.communicate(timeout=30)


def sleep_kv(memory: Memory) -> tuple[int, int, tuple[Holder, ...]]:
    report = memory.sleep(KV).tags[0]
    return report.unmapped_bytes, report.returned_bytes, report.holders


# ---- exports -------------------------------------------------------------------------------------------------------------------


def test_exports_give_addresses_sizes_and_descriptors_of_the_very_memory(memory: Memory) -> None:
    t = kv_cache(memory, 3 * MIB // 2)
    with memory.exports("kv_cache") as exported:
        [region] = exported.regions
        assert (region.address, region.nbytes, exported.nbytes) == (t.data_ptr(), 3 * MIB // 2, 3 * MIB // 2)
        assert region.extents == (MIB, MIB // 2)
        assert memory.stats().tag("kv_cache").exported
        with mmap.mmap(region.fds[1], MIB // 2) as view:
            view[5] = 0x77
        assert int(t[MIB + 5]) == 0x77
    with pytest.raises(OSError):
        os.fstat(region.fds[0])
    memory.sleep(KV)
    assert not memory.stats().tag("kv_cache").exported


def test_exports_are_refused_asleep_and_for_pools_that_were_not_made_for_it(memory: Memory) -> None:
    t = kv_cache(memory)
    memory.pool("weights")
    with pytest.raises(ConfigurationError, match="exportable=True"):
        memory.exports("weights")
    memory.sleep(KV)
    with pytest.raises(StateError, match=r"wake\(\['kv_cache'\]\)"):
        memory.exports("kv_cache")
    assert t.numel()


def test_an_export_that_fails_half_way_leaves_no_descriptor(memory: Memory, device: Device) -> None:
    tensors = kv_cache(memory), kv_cache(memory)
    for nth in (1, 3):
        with no_descriptors_left(), Fault(device, Op.EXPORT, nth), pytest.raises(DeviceError):
            memory.exports("kv_cache")
    assert tensors


def test_an_export_during_a_sleep_of_another_thread_is_refused_at_once(memory: Memory) -> None:
    t = kv_cache(memory)
    errors: list[BaseException] = []

    def export() -> None:
        try:
            memory.exports("kv_cache")
        except StateError as error:
            errors.append(error)

    def hook() -> None:
        thread = threading.Thread(target=export)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()

    memory.register_tag_hooks("kv_cache", hook)
    memory.sleep(KV)
    assert [str(e) for e in errors] == ["a sleep is under way; retry after it"]
    assert t.numel()


def test_the_ledger_knows_who_was_given_which_mapping(memory: Memory) -> None:
    t = kv_cache(memory)
    ledger = memory.export_ledger
    first = ledger.grant("d1", "kv_cache", 4711)
    memory.sleep(KV)
    memory.wake()
    second = ledger.grant("d2", "kv_cache")
    assert second.mapping == first.mapping + 1
    assert (str(first), str(second)) == ("peer d1 (pid 4711)", "peer d2")
    assert ledger.grants("kv_cache", second.mapping) == (second,)
    ledger.end(first)
    ledger.end(first)
    assert ledger.grants() == (second,)
    with pytest.raises(UnknownTagError):
        ledger.grant("d3", "nosuch")
    assert t.numel()


# ---- M11 -----------------------------------------------------------------------------------------------------------------------


def test_m11_nobody_holds_anything_and_everything_is_returned(memory: Memory) -> None:
    t = kv_cache(memory)
    memory.exports("kv_cache").close()
    assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())
    assert t.numel()


def test_m11_a_peer_that_still_maps_it_is_named_and_reads_old_bytes(memory: Memory) -> None:
    t = kv_cache(memory)
    with contextlib.ExitStack() as stack:
        with memory.exports("kv_cache") as exported:
            peer = stack.enter_context(Peer(exported.regions[0].fds[:1]))
        memory.export_ledger.grant("d1", "kv_cache", peer.pid)
        assert sleep_kv(memory) == (2 * MIB, MIB, (Holder(who=f"peer d1 (pid {peer.pid})", bytes=MIB),))
        memory.wake()
        t.fill_(0x22)
        assert (peer.first_byte(), int(t[0])) == (0x11, 0x22)
        assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())  # the peer holds memory of the mapping before this one


def test_m11_a_process_that_only_keeps_the_descriptor_holds_it_too(memory: Memory) -> None:
    t = kv_cache(memory)
    with contextlib.ExitStack() as stack:
        with memory.exports("kv_cache") as exported:
            peer = stack.enter_context(Peer(exported.regions[0].fds, "keep"))
        unmapped, returned, holders = sleep_kv(memory)
        assert (unmapped, returned) == (2 * MIB, 0)
        assert [h.bytes for h in holders] == [2 * MIB]
        assert f"process {peer.pid} (python" in holders[0].who
    assert t.numel()


def test_m11_two_holders_of_the_same_memory_do_not_count_twice(memory: Memory) -> None:
    t = kv_cache(memory)
    with contextlib.ExitStack() as stack:
        with memory.exports("kv_cache") as exported:
            peers = [stack.enter_context(Peer(exported.regions[0].fds)) for _ in range(2)]
        unmapped, returned, holders = sleep_kv(memory)
        assert (unmapped, returned) == (2 * MIB, 0)
        assert sorted(h.bytes for h in holders) == [2 * MIB, 2 * MIB]
        assert len(peers) == 2
    assert t.numel()


def test_m11_an_import_or_a_descriptor_of_this_process_counts(memory: Memory, device: Device) -> None:
    t = kv_cache(memory)
    exported = memory.exports("kv_cache")
    region = exported.regions[0]
    imported = device.import_extents(region.fds, region.extents)
    exported.close()
    assert sleep_kv(memory) == (2 * MIB, 0, (Holder(who="this process (an import or an open descriptor)", bytes=2 * MIB),))
    imported.close()
    memory.wake()
    left_open = memory.exports("kv_cache")
    assert sleep_kv(memory)[1] == 0
    left_open.close()
    assert t.numel()


def test_m11_an_open_grant_is_believed_where_its_process_cannot_be_looked_into(memory: Memory) -> None:
    t = kv_cache(memory)
    memory.exports("kv_cache").close()
    grant = memory.export_ledger.grant("far away", "kv_cache")
    assert sleep_kv(memory) == (2 * MIB, 0, (Holder(who="peer far away, which cannot be looked into", bytes=2 * MIB),))
    memory.export_ledger.end(grant)
    memory.wake()
    memory.exports("kv_cache").close()
    gone = Peer(())
    gone.__exit__()
    memory.export_ledger.grant("gone", "kv_cache", gone.pid)
    assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())
    assert t.numel()


@needs_pinning
def test_m11_p4a_a_pin_of_this_process_holds_what_it_pins_and_a_release_is_seen(memory: Memory) -> None:
    t = kv_cache(memory)
    with PinnedRegistration(t.data_ptr(), MIB) as registration:
        assert pinned_bytes() == MIB
        assert sleep_kv(memory) == (2 * MIB, MIB, (Holder(who=f"pinned by this process (pid {os.getpid()})", bytes=MIB),))
        memory.wake()
        t.fill_(0x22)
        registration.remote_write(1, b"\x99")
        assert registration.remote_read(0, 2) == b"\x11\x99"  # the old pages, with success
        assert t[:2].tolist() == [0x22, 0x22]
        assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())  # what is pinned is memory of the mapping before this one
        memory.wake()
    assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())


@needs_pinning
def test_m11_p4a_a_registration_that_follows_the_hooks_holds_nothing_and_reads_new_bytes(memory: Memory) -> None:
    t = kv_cache(memory)
    registrations = [PinnedRegistration(t.data_ptr(), t.nbytes)]
    memory.register_tag_hooks(
        "kv_cache",
        before_unmap=lambda: registrations.pop().close(),
        after_map=lambda: registrations.append(PinnedRegistration(t.data_ptr(), t.nbytes)),
    )
    for value in (0x22, 0x33):
        assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())
        assert pinned_bytes() == 0
        memory.wake()
        t.fill_(value)
        assert registrations[0].remote_read(MIB, 1) == bytes([value])
    registrations.pop().close()


@needs_pinning
def test_m11_what_a_hook_explains_is_no_memory_of_the_pool(memory: Memory) -> None:
    """A transport's own buffers, pinned after the pool was mapped: without its word they count as the pool's. It counts once."""
    t = kv_cache(memory)
    buffer = torch.zeros(2 * MIB, dtype=torch.uint8)
    explaining = [True]

    def explain() -> None:
        if explaining.pop():
            memory.explain_pins(pinned_bytes())

    memory.register_tag_hooks("kv_cache", before_unmap=explain, after_map=lambda: explaining.append(False))
    with PinnedRegistration(buffer.data_ptr() // 4096 * 4096 + 4096, MIB):
        assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())
    memory.wake()
    with PinnedRegistration(t.data_ptr(), MIB):
        assert sleep_kv(memory)[:2] == (2 * MIB, MIB)


@needs_pinning
def test_m11_what_was_pinned_before_a_pool_was_mapped_is_not_its_memory(memory: Memory) -> None:
    buffer = torch.zeros(2 * MIB, dtype=torch.uint8)
    with PinnedRegistration(buffer.data_ptr() // 4096 * 4096 + 4096, MIB):
        t = kv_cache(memory)
        assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())
        assert t.numel()


@needs_pinning
def test_m11_pins_that_are_known_to_be_of_a_pool_are_not_looked_for_in_another(memory: Memory) -> None:
    """The KV cache is registered and stays; the weights alone sleep."""
    weights = memory.pool("weights").zeros(2 * MIB, torch.uint8)
    t = kv_cache(memory)
    with PinnedRegistration(t.data_ptr(), MIB):
        memory.note_pins("kv_cache", "transport", MIB)
        for _ in range(2):  # also with weights that were mapped while the KV cache was pinned
            assert memory.sleep({"weights": "host"}).tags[0].returned_bytes == 2 * MIB
            memory.wake()
        with PinnedRegistration(weights.data_ptr(), MIB):
            assert memory.sleep({"weights": "host"}).tags[0].returned_bytes == MIB, "pins that nobody knows count as before"
            memory.wake()
        assert sleep_kv(memory)[:2] == (2 * MIB, MIB), "and known ones of a pool that sleeps"
        memory.wake()
    memory.note_pins("kv_cache", "transport", 0)
    assert sleep_kv(memory) == (2 * MIB, 2 * MIB, ())


@needs_pinning
def test_m11_a_pin_is_counted_once_and_not_for_pools_mapped_after_it(memory: Memory) -> None:
    t = kv_cache(memory)
    weights = memory.pool("weights").zeros(2 * MIB, torch.uint8)
    with PinnedRegistration(t.data_ptr(), MIB):
        later = memory.pool("later").zeros(2 * MIB, torch.uint8)
        report = memory.sleep({"weights": "host", "kv_cache": "discard", "later": "discard"})
        assert {t.tag: t.returned_bytes for t in report.tags} == {"kv_cache": MIB, "weights": 2 * MIB, "later": 2 * MIB}
        assert report.held_bytes == MIB
    assert weights.numel() + later.numel()


# ---- P4 ------------------------------------------------------------------------------------------------------------------------


def test_p4_a_guarded_pool_reads_zeros_while_asleep_and_keeps_no_late_write(memory: Memory) -> None:
    t = kv_cache(memory, guarded=True)
    memory.sleep(KV)
    assert int(t.sum()) == 0
    t[100] = 5
    memory.check_integrity()
    memory.wake()
    assert int(t[100]) == 0
    assert resident_bytes(t.data_ptr(), t.data_ptr() + t.nbytes) == t.nbytes
    assert all(m.inode[1] for m in read_mappings() if t.data_ptr() <= m.start < t.data_ptr() + t.nbytes)


def test_p4_a_late_read_that_copies_in_the_owners_process_neither_kills_it_nor_yields_content(memory: Memory) -> None:
    t = kv_cache(memory, guarded=True)
    memory.sleep(KV)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # What UCX does over TCP: the kernel reads the owner's range on the owner's behalf.
        assert ours.send(memoryview(t.numpy())[:4096]) == 4096
        assert theirs.recv(4096, socket.MSG_WAITALL) == bytes(4096)


def test_m11_a_forked_child_that_inherited_the_descriptors_is_named(memory: Memory) -> None:
    weights = memory.pool("weights").zeros(2 * MIB, torch.uint8)
    end, wait = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        os.close(wait)
        os.read(end, 1)
        os._exit(0)
    try:
        os.close(end)
        report = memory.sleep({"weights": "host"}).tags[0]
        assert report.returned_bytes == 0
        assert [(h.who.split(" (")[0], h.bytes) for h in report.holders] == [(f"process {child}", 2 * MIB)]
        memory.wake()
        assert memory.sleep({"weights": "host"}).tags[0].returned_bytes == 2 * MIB  # not in the child
    finally:
        os.close(wait)
        os.waitpid(child, 0)
    assert weights.numel()
