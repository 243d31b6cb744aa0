"""torpor.memory on a GPU: M1-M11, and the kernels that it stands on."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torpor._native import Device, Op
from torpor.errors import ConfigurationError, DeviceMemoryError, HookError, HostMemoryError, StateError, UnknownTagError
from torpor.memory import Content, Memory, MemoryConfig, Residency

pytestmark = pytest.mark.gpu

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 256 * KIB
CONFIG = MemoryConfig(driver="cuda", extent_bytes=4 * MIB, chunk_bytes=CHUNK)
SIZE = 10 * MIB


@pytest.fixture
def device() -> Iterator[Device]:
    opened = Device.open("cuda", faults=True)
    yield opened
    gc.collect()  # caught exceptions keep a test's tensors
    opened.clear_faults()
    opened.close()  # fails while anything lives on it


@pytest.fixture
def memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
    with Memory(CONFIG, device=device) as m:
        yield m


def filled(memory: Memory, tag: str, nbytes: int = SIZE, **settings: Any) -> torch.Tensor:
    tensor = memory.pool(tag, **settings).empty(nbytes // 8, torch.int64)
    return tensor.copy_(pattern(tensor))


def pattern(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(tensor.numel(), device=tensor.device).mul_(0x9E3779B97F4A7C1)


def is_filled(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, pattern(tensor))


# ---- kernels -------------------------------------------------------------------------------------------------------------------


def test_the_device_hashes_with_a_kernel(device: Device) -> None:
    assert device.hash_path() == "kernel on the device"


@pytest.mark.parametrize("nbytes", [8 * MIB, 8 * MIB - 8, 8 * MIB - 3, 3 * CHUNK + 17, 40, 1])
@pytest.mark.parametrize("offset", [0, 16, 8, 5])
def test_m7_the_same_bytes_have_the_same_hash_on_the_device_and_on_the_host(device: Device, nbytes: int, offset: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    with device.create_region(16 * MIB, extent_bytes=4 * MIB) as region:
        device.copy("to_device", [(region.address + offset, data.ctypes.data, nbytes)])
        for chunk_bytes in (64 * KIB, CHUNK, 2 * MIB, 24 * KIB + 8):
            there = device.hash_chunks(region.address + offset, nbytes, chunk_bytes)
            assert (there == device.hash_chunks(data.ctypes.data, nbytes, chunk_bytes, on_host=True)).all()


@pytest.mark.parametrize("block", [16, 48, 4 * KIB, 4 * KIB + 16, 16 * KIB, 16 * KIB - 16, 1 * MIB, 100, 12])
def test_scattered_blocks_are_copied_to_where_they_belong(device: Device, block: int) -> None:
    count = min(4 * MIB // block, 3000)
    generator = np.random.default_rng(block)
    data = generator.integers(0, 256, (count, block), dtype=np.uint8)
    to, source = generator.permutation(count), generator.permutation(count)
    with device.create_region(8 * MIB, extent_bytes=4 * MIB) as region:
        src, dst = region.address, region.address + 4 * MIB
        device.copy("to_device", [(src, data.ctypes.data, data.nbytes)])
        device.copy_blocks(dst, src, block, to, source)
        found = np.empty_like(data)
        device.copy("to_host", [(found.ctypes.data, dst, data.nbytes)])
    expected = np.empty_like(data)
    expected[to] = data[source]
    assert (found == expected).all()


def test_blocks_are_copied_while_their_caller_does_something_else(device: Device) -> None:
    block, count = 16 * KIB, 1 << 16
    ids = np.random.default_rng(0).permutation(count).astype(np.uint64)
    with device.create_region(block * count, extent_bytes=block * count) as region:
        device.copy_blocks(region.address, region.address, block, ids, ids)
        begun = time.perf_counter()
        with device.begin_copy_blocks(region.address, region.address, block, ids, ids):
            asked = time.perf_counter() - begun
        assert asked < 0.7 * (time.perf_counter() - begun)


def test_a_block_outside_its_limits_is_not_copied(device: Device) -> None:
    with device.create_region(4 * MIB, extent_bytes=4 * MIB) as region:
        for limits in ((8, 7), (7, 8)):
            with pytest.raises(ConfigurationError, match="outside"):
                device.copy_blocks(region.address, region.address, 4 * KIB, [1, 7], [7, 1], limits=limits)


# ---- M1, M6, M7, M11 -----------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_m1_m11_addresses_stay_bytes_come_back_and_the_device_gets_what_the_report_says(memory: Memory, device: Device) -> None:
    weights, kv = filled(memory, "weights", 64 * MIB), filled(memory, "kv_cache", 32 * MIB, policy="discard")
    addresses = weights.data_ptr(), kv.data_ptr()
    for number in range(4):
        torch.cuda.synchronize()
        before = device.free_bytes()
        report = memory.sleep()
        assert (report.unmapped_bytes, report.returned_bytes, report.held_bytes) == (96 * MIB, 96 * MIB, 0)
        back = device.free_bytes() - before
        assert memory.stats().mapped_bytes == 0
        wake = memory.wake()
        assert [(t.mapped_bytes, t.restored_bytes) for t in wake.tags] == [(64 * MIB, 64 * MIB), (32 * MIB, 0)]
        if number > 0:  # the first cycle loads kernels and makes streams; nobody else is on the device
            assert (back, device.free_bytes()) == (report.returned_bytes, before)
        assert (weights.data_ptr(), kv.data_ptr()) == addresses
        assert is_filled(weights)
        memory.mark_valid("kv_cache")
        memory.check_integrity()


def test_m7_a_clean_sleep_copies_nothing_and_a_changed_byte_one_chunk(memory: Memory) -> None:
    a = filled(memory, "a")
    assert memory.sleep().tags[0].copied_bytes == SIZE
    memory.wake()
    assert memory.sleep().tags[0].copied_bytes == 0
    memory.wake()
    a.view(torch.uint8)[3 * CHUNK + 5] ^= 1
    changed = a.clone()
    assert memory.sleep().tags[0].copied_bytes == CHUNK
    memory.wake()
    assert torch.equal(a, changed)


def test_m7_work_in_flight_is_waited_for(memory: Memory) -> None:
    a = memory.pool("a").zeros(64 * MIB, torch.uint8)
    memory.prepare_images(fill=True)
    for _ in range(50):
        a += 1
    memory.sleep()
    memory.wake()
    assert int(a.min()) == int(a.max()) == 50


def test_after_prepared_and_filled_images_the_first_sleep_copies_nothing(memory: Memory) -> None:
    a = filled(memory, "a")
    assert memory.prepare_images(fill=True) == SIZE
    assert memory.sleep().tags[0].copied_bytes == 0
    memory.wake()
    assert is_filled(a)


def test_what_is_loaded_through_its_image_needs_no_copy_at_the_first_sleep(memory: Memory) -> None:
    a = memory.pool("a").empty((SIZE // 4,), torch.float32)
    with memory.load_through_images([a]) as [staging]:
        staging.copy_(torch.arange(staging.numel()))
    del staging
    assert torch.equal(a.cpu(), torch.arange(a.numel(), dtype=torch.float32))
    assert memory.sleep().tags[0].copied_bytes == 0
    memory.wake()
    assert torch.equal(a.cpu(), torch.arange(a.numel(), dtype=torch.float32))


def test_m6_images_are_kept_or_given_back_as_the_pool_says(memory: Memory) -> None:
    keeps, gives = filled(memory, "keeps"), filled(memory, "gives", image="release")
    memory.sleep()
    assert memory.stats().host_committed_bytes == 2 * SIZE
    memory.wake()
    assert [t.image_bytes for t in memory.stats().tags] == [SIZE, 0]
    assert memory.stats().host_committed_bytes == SIZE
    memory.sleep()
    memory.wake()
    assert is_filled(keeps)
    assert is_filled(gives)


def test_m11_who_was_given_the_memory_and_did_not_end_it_is_named(memory: Memory) -> None:
    kv = filled(memory, "kv_cache", policy="discard", exportable=True)
    grant = memory.export_ledger.grant("d1", "kv_cache")
    with memory.exports("kv_cache") as exported:
        assert sum(sum(r.extents) for r in exported.regions) >= SIZE
    report = memory.sleep().tags[0]
    assert report.returned_bytes == 0
    assert "d1" in report.holders[0].who
    memory.export_ledger.end(grant)
    memory.wake()
    memory.mark_valid("kv_cache")
    assert memory.sleep().tags[0].returned_bytes == report.unmapped_bytes
    del kv


def test_an_importer_reads_what_the_exporter_wrote(memory: Memory, device: Device) -> None:
    a = filled(memory, "a", exportable=True)
    with memory.exports("a") as exported:
        [region] = exported.regions
        with device.import_extents(region.fds, region.extents) as imported:
            there = device.hash_chunks(imported.address, SIZE, CHUNK)
            assert (there == device.hash_chunks(a.data_ptr(), SIZE, CHUNK)).all()


# ---- M2, M3 --------------------------------------------------------------------------------------------------------------------


def test_m2_m3_hooks_let_go_before_the_unmap_and_come_back_after_the_map(memory: Memory) -> None:
    tensors = [filled(memory, "a"), filled(memory, "b", policy="discard")]
    seen: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        seen.append((what, memory.stats().mapped_bytes > 0))

    for tag in ("a", "b"):
        memory.register_tag_hooks(tag, lambda tag=tag: note(f"before {tag}"), lambda tag=tag: note(f"after {tag}"))
    memory.sleep()
    memory.wake()
    # b has nothing to wait for: its hook comes back while the content of a is still on its way.
    assert seen == [("before b", True), ("before a", True), ("after b", True), ("after a", True)]
    assert is_filled(tensors[0])


def test_m2_a_hook_that_raises_leaves_everything_mapped(memory: Memory) -> None:
    a = filled(memory, "a")
    memory.register_tag_hooks("a", before_unmap=lambda: 1 // 0)
    with pytest.raises(HookError):
        memory.sleep()
    assert memory.pool("a").residency is Residency.RESIDENT
    assert is_filled(a)


# ---- M4, M5 --------------------------------------------------------------------------------------------------------------------


def test_m4_without_host_memory_nothing_is_unmapped(device: Device) -> None:
    config = MemoryConfig(driver="cuda", extent_bytes=4 * MIB, chunk_bytes=CHUNK, host_limit_bytes=SIZE)
    with Memory(config, device=device) as memory:
        tensors = [filled(memory, "a"), filled(memory, "b")]
        with pytest.raises(HostMemoryError, match="host_limit_bytes"):
            memory.sleep()
        assert memory.stats().host_committed_bytes == 0
        assert all(is_filled(t) for t in tensors)
        memory.sleep({"a": "host", "b": "discard"})
        memory.wake()
        assert is_filled(tensors[0])
        tensors.clear()


@pytest.mark.parametrize("nth", [1, 4, 5])
def test_m5_without_device_memory_all_stay_asleep_with_their_images(memory: Memory, device: Device, nth: int) -> None:
    """The fifth extent is one of the tag that gets no content; the other's images are being copied then."""
    a, kv = filled(memory, "a", 16 * MIB), filled(memory, "kv_cache", 8 * MIB, policy="discard")
    memory.sleep()
    device.arm_fault(Op.CREATE, nth)
    with pytest.raises(DeviceMemoryError) as caught:
        memory.wake()
    assert caught.value.fields["bytes_needed"] == 24 * MIB
    assert caught.value.fields["bytes_free"] > 0
    assert memory.stats().mapped_bytes == 0
    assert {t.residency for t in memory.stats().tags} == {Residency.ASLEEP}
    memory.check_integrity()
    memory.wake()
    assert is_filled(a)
    assert kv.numel()


def test_images_are_copied_while_memory_is_created(memory: Memory) -> None:
    a, kv = filled(memory, "a"), filled(memory, "kv_cache", policy="discard")
    memory.sleep()
    assert "create_map" not in memory.wake().phases_s
    assert is_filled(a)
    kv.zero_()
    assert int(kv.sum()) == 0


# ---- M8, M9, M10 ---------------------------------------------------------------------------------------------------------------


def test_m8_what_sleeps_on_the_host_can_be_discarded_without_waking(memory: Memory) -> None:
    a = filled(memory, "a")
    memory.sleep()
    memory.sleep({"a": "discard"})
    assert memory.stats().host_committed_bytes == 0
    assert memory.wake().tags[0].content is Content.LOST
    assert a.numel()


def test_m9_repeated_moves_say_so_and_unknown_tags_are_errors(memory: Memory) -> None:
    a = filled(memory, "a")
    assert not memory.sleep().noop
    assert memory.sleep().noop
    assert not memory.wake().noop
    assert memory.wake().noop
    with pytest.raises(UnknownTagError, match="known: a"):
        memory.sleep({"nosuch": "host"})
    assert is_filled(a)


def test_m10_freeing_and_allocating_while_asleep(memory: Memory) -> None:
    a, b = filled(memory, "a"), filled(memory, "a")
    memory.sleep()
    with pytest.raises(StateError, match="wake"):
        memory.pool("a").empty(10)
    del b
    gc.collect()
    memory.check_integrity()
    assert memory.stats().host_committed_bytes == SIZE
    memory.wake()
    assert is_filled(a)


# ---- endurance -----------------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_hundred_cycles_leave_device_and_host_bytes_as_they_were(memory: Memory, device: Device) -> None:
    a, kv = filled(memory, "a", 64 * MIB), filled(memory, "kv_cache", 64 * MIB, policy="discard")
    for number in range(105):
        if number == 5:  # PyTorch has its own memory by now
            before = device.free_bytes(), memory.stats().host_committed_bytes, resident_kib()
        memory.mark_valid("kv_cache")
        a[number * 1000] += 1
        memory.sleep()
        memory.wake()
    assert (device.free_bytes(), memory.stats().host_committed_bytes) == before[:2]
    assert resident_kib() - before[2] < 16 * KIB
    a[: 105 * 1000 : 1000] -= 1
    assert is_filled(a)
    assert kv.numel()


def resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))
