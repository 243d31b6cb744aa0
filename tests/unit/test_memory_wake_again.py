"""A wake that failed late, or was interrupted, and the one after it; and what its hooks may not do while it copies."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from interrupts import Interrupt
from torch_fake import FakeTorch, torch_pool

from torpor._native import Device, Op
from torpor.errors import DeviceError, HookError, StateError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.memory.shared import Shared
from torpor.testing.driver import Fault

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "maps_beside", True)


def filled(memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    weights = memory.pool("weights").empty(2 * MIB, torch.uint8).fill_(7)
    kv = memory.pool("kv_cache", policy="discard", exportable=True).zeros(2 * MIB, torch.uint8)
    return weights, kv


def states(memory: Memory) -> set[Residency]:
    return {t.residency for t in memory.stats().tags}


# ---- content -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.HASH, Op.COPY])
def test_a_tag_that_a_hook_said_is_valid_is_lost_when_the_copies_beside_it_fail(
    memory: Memory, device: Device, beside: None, op: Op
) -> None:
    weights, kv = filled(memory)

    def fill() -> None:
        kv.zero_()
        memory.mark_valid("kv_cache")

    memory.register_tag_hooks("kv_cache", after_map=fill)
    memory.sleep()
    with Fault(device, op, 1), pytest.raises(DeviceError):
        memory.wake()
    kv_cache = memory.stats().tag("kv_cache")
    assert (kv_cache.residency, kv_cache.content) == (Residency.ASLEEP, Content.LOST)
    memory.check_integrity()
    memory.wake()
    assert weights.eq(7).all()
    assert memory.stats().tag("kv_cache").content is Content.VALID
    memory.sleep()
    memory.wake()
    assert weights.eq(7).all()


# ---- the mapping's number ------------------------------------------------------------------------------------------------------


def mapping_of(memory: Memory) -> tuple[int, set[int]]:
    """Its number, and the memory it is of."""
    with memory.exports("kv_cache") as exported:
        return exported.mapping, {os.fstat(fd).st_ino for region in exported.regions for fd in region.fds}


def is_another(memory: Memory, before: tuple[int, set[int]]) -> bool:
    number, pieces = mapping_of(memory)
    assert not pieces & before[1]
    return number > before[0]


@pytest.mark.parametrize("copies_beside", [False, True])
def test_a_wake_that_fails_and_cannot_unmap_again_has_made_another_mapping(
    memory: Memory, device: Device, monkeypatch: pytest.MonkeyPatch, copies_beside: bool
) -> None:
    monkeypatch.setattr(Shared, "maps_beside", copies_beside)
    weights, kv = filled(memory)
    before = mapping_of(memory)
    memory.sleep()
    with Fault(device, Op.HASH, 1):
        device.arm_fault(Op.UNMAP, 1, 100)
        with pytest.raises(DeviceError) as caught:
            memory.wake()
    assert caught.value.fields["unmap_failure"]
    assert states(memory) == {Residency.RESIDENT}
    memory.wake()
    assert is_another(memory, before)
    assert weights.eq(7).all()
    assert kv.numel()


def test_what_a_hook_saw_beside_copies_that_failed_is_not_the_mapping_of_the_next_wake(
    memory: Memory, device: Device, beside: None
) -> None:
    weights, kv = filled(memory)
    seen: list[tuple[int, set[int]]] = []
    memory.register_tag_hooks("kv_cache", after_map=lambda: seen.append(mapping_of(memory)))
    memory.sleep()
    with Fault(device, Op.HASH, 1), pytest.raises(DeviceError):
        memory.wake()
    memory.wake()
    assert len(seen) == 2
    assert is_another(memory, seen[0])
    assert weights.numel() + kv.numel()


def test_a_wake_that_is_interrupted_once_it_has_mapped_has_made_another_mapping(memory: Memory) -> None:
    weights, kv = filled(memory)
    memory.export_ledger.grant("peer", "kv_cache")
    before = mapping_of(memory)
    memory.sleep()
    with Interrupt(1, "tp_regions_map"), pytest.raises(KeyboardInterrupt):
        memory.wake()
    memory.wake()
    assert is_another(memory, before)
    assert not memory.export_ledger.grants("kv_cache", mapping_of(memory)[0]), "it was of the mapping before"
    assert weights.eq(7).all()
    assert kv.numel()


def test_what_a_sleep_could_not_unmap_is_of_the_same_mapping(memory: Memory, device: Device) -> None:
    weights, kv = filled(memory)
    before = mapping_of(memory)
    with Fault(device, Op.UNMAP, 1), pytest.raises(DeviceError, match="repeat the sleep"):
        memory.sleep()
    memory.wake()
    assert mapping_of(memory) == before
    assert weights.numel() + kv.numel()


def test_a_wake_that_maps_nothing_is_of_the_same_mapping(memory: Memory) -> None:
    weights, kv = filled(memory)
    memory.sleep()
    memory.wake()
    before = mapping_of(memory)
    memory.wake()
    assert mapping_of(memory) == before
    assert weights.numel() + kv.numel()


# ---- in a hook beside the copies -----------------------------------------------------------------------------------------------

FORBIDDEN: dict[str, Callable[[Memory], object]] = {
    "prepare_images": lambda memory: memory.prepare_images(fill=True),
    "release_images": lambda memory: memory.release_images("runtime"),
    "take_ahead": lambda memory: memory.take_ahead(MIB),
    "end_ahead": lambda memory: memory.end_ahead(),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_hook_beside_the_copies_may_not_touch_images(memory: Memory, beside: None, name: str) -> None:
    weights, kv = filled(memory)
    runtime = memory.pool("runtime", policy="keep").empty(MIB, torch.uint8).fill_(1)
    memory.prepare_images({"runtime": "host"}, fill=True)
    unregister = memory.register_tag_hooks("kv_cache", after_map=lambda: FORBIDDEN[name](memory) and None, name="busy")
    memory.sleep()
    images = memory.stats().tag("runtime").image_bytes
    with pytest.raises(HookError, match="busy") as caught:
        memory.wake()
    assert isinstance(caught.value.__cause__, StateError)
    assert [t.restored_bytes for t in caught.value.fields["report"].tags] == [2 * MIB, 0, 0]
    assert (states(memory), memory.stats().tag("runtime").image_bytes) == ({Residency.RESIDENT}, images)
    assert weights.eq(7).all()
    memory.check_integrity()
    FORBIDDEN[name](memory)
    unregister()
    assert runtime.eq(1).all()
    assert kv.numel()


@pytest.mark.parametrize("how", ["trim", "capture"])
def test_what_torch_freed_is_not_destroyed_beside_the_copies(memory: Memory, beside: None, how: str) -> None:
    fake = FakeTorch()
    pool, cache = torch_pool(memory, fake, "weights"), torch_pool(memory, fake, "kv_cache", policy="discard", exportable=True)
    weights, kv = filled(memory)
    with pool:
        tensors = [fake.empty(2 * MIB)]
    tensors[0].fill(9)
    memory.sleep()
    seen = []

    def free() -> None:
        if how == "trim":
            tensors.clear()
            pool.trim()
        else:
            with cache.graph_memory():
                tensors.clear()
        seen.append((pool.stats().regions, pool.stats().image_bytes))

    memory.register_tag_hooks("kv_cache", after_map=free)
    memory.wake()
    assert seen == [(2, 4 * MIB)]
    assert weights.eq(7).all()
    pool.trim()
    assert (pool.stats().regions, pool.stats().image_bytes) == (1, 2 * MIB)
    memory.check_integrity()
    assert kv.numel()
