"""Waking: M3 (after_map hooks), M5 (all or nothing), M6 (images), and how a sleep that stopped half way ends (M12)."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from torpor._native import ChunkImage, Device, Op
from torpor.errors import DeviceError, DeviceMemoryError, HookError, RemoteError, StateError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.memory.procfs import read_mappings
from torpor.testing.driver import Fault

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


def filled(memory: Memory, tag: str, nbytes: int = 2 * MIB, **settings: Any) -> torch.Tensor:
    tensor = memory.pool(tag, **settings).empty(nbytes // 8, torch.int64)
    return torch.arange(tensor.numel(), out=tensor)


def is_filled(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, torch.arange(tensor.numel()))


def mapped_files(tensor: torch.Tensor) -> int:
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return sum(bool(m.inode[1]) and m.start < end and m.end > start for m in read_mappings())


def residencies(memory: Memory) -> dict[str, Residency]:
    return {t.tag: t.residency for t in memory.stats().tags}


# ---- M3 ------------------------------------------------------------------------------------------------------------------------


def test_m3_after_map_runs_oldest_first_once_content_is_back(memory: Memory) -> None:
    a, b = filled(memory, "a"), filled(memory, "b")
    lines: list[str] = []
    for tag, name in (("a", "a1"), ("b", "b1"), ("a", "a2")):
        memory.register_tag_hooks(tag, after_map=lambda name=name: lines.append(f"{name} {is_filled(a) and is_filled(b)}"))
    memory.sleep()
    assert lines == []
    memory.wake()
    assert lines == ["a1 True", "b1 True", "a2 True"]


def test_m3_after_map_runs_also_when_nothing_was_mapped_but_only_for_asked_tags_that_are(memory: Memory) -> None:
    kept = filled(memory, "a"), filled(memory, "b")
    lines: list[str] = []
    for tag in ("a", "b"):
        memory.register_tag_hooks(tag, after_map=lambda tag=tag: lines.append(tag))
    assert memory.wake().noop
    assert lines == ["a", "b"]
    memory.sleep({"a": "host"})
    memory.wake(["b"])
    assert lines == ["a", "b", "b"]
    memory.wake(["a"])
    assert lines == ["a", "b", "b", "a"]
    assert kept


def test_m3_a_failing_hook_leaves_memory_mapped_is_reported_and_retried(memory: Memory) -> None:
    a, b = filled(memory, "a"), filled(memory, "b")
    lines: list[str] = []
    broken = [True]

    def restore() -> None:
        lines.append("bad")
        if broken[0]:
            raise RuntimeError("no NIC")

    memory.register_tag_hooks("a", after_map=restore, name="connector")
    memory.register_tag_hooks("b", after_map=lambda: lines.append("good"))
    memory.sleep()
    with pytest.raises(HookError, match=r"hook 'connector' of tag 'a' failed in after_map: RuntimeError\('no NIC'\)") as caught:
        memory.wake()
    assert lines == ["bad", "good"]
    assert caught.value.report.tags[0].restored_bytes == a.nbytes
    assert (caught.value.phase, caught.value.failures) == ("after_map", ("connector: RuntimeError('no NIC')",))
    assert isinstance(RemoteError.encode(caught.value)["fields"]["report"], str)
    assert is_filled(a)
    assert is_filled(b)
    assert memory.stats().wakes == 1
    broken[0] = False
    assert memory.wake().noop
    assert lines == ["bad", "good", "bad", "good"]


# ---- M5 ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_m5_out_of_device_memory_leaves_all_asleep_and_every_image_intact(memory: Memory, device: Device, nth: int) -> None:
    a, b = filled(memory, "a"), filled(memory, "b")  # two extents each
    calls: list[str] = []
    memory.register_tag_hooks("a", after_map=lambda: calls.append("a"))
    memory.sleep()
    maps = device.fault_calls(Op.MAP)
    with Fault(device, Op.CREATE, nth), pytest.raises(DeviceMemoryError) as caught:
        memory.wake()
    assert caught.value.fields["bytes_needed"] > 0
    assert "bytes_free" in caught.value.fields
    assert device.fault_calls(Op.MAP) == maps
    assert (mapped_files(a), mapped_files(b), calls) == (0, 0, [])
    assert residencies(memory) == {"a": Residency.ASLEEP, "b": Residency.ASLEEP}
    assert device.stats().live_extents == 0
    memory.check_integrity()
    memory.wake()
    assert is_filled(a)
    assert is_filled(b)


def test_m5_nothing_is_mapped_before_everything_asked_is_created(
    memory: Memory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [filled(memory, tag) for tag in ("a", "b", "c")]
    memory.sleep()
    batches: list[int] = []
    map_ = device.map

    def count(regions: Any) -> None:
        batches.append(len(regions))
        map_(regions)

    monkeypatch.setattr(device, "map", count)
    memory.wake()
    assert batches == [3]
    assert len(kept) == 3


# ---- M6 ------------------------------------------------------------------------------------------------------------------------


def test_m6_images_outlive_the_wake_by_default(memory: Memory) -> None:
    a = filled(memory, "a")
    memory.sleep()
    memory.wake()
    assert memory.stats().tag("a").image_bytes == a.nbytes
    assert memory.sleep().tags[0].copied_bytes == 0
    with pytest.raises(StateError, match="are its content"):
        memory.release_images("a")
    memory.wake()
    assert memory.release_images("a") == a.nbytes
    assert memory.stats().host_committed_bytes == 0
    memory.sleep()
    memory.wake()
    assert is_filled(a)


@pytest.mark.parametrize("op", [Op.CREATE, Op.MAP, Op.COPY, Op.HASH])
def test_m6_a_released_image_goes_only_after_the_wake_that_used_it(memory: Memory, device: Device, op: Op) -> None:
    a = filled(memory, "a", image="release")
    memory.sleep()
    with Fault(device, op), pytest.raises((DeviceError, DeviceMemoryError)):
        memory.wake()
    assert memory.stats().tag("a").image_bytes == a.nbytes
    assert residencies(memory) == {"a": Residency.ASLEEP}
    memory.check_integrity()
    memory.wake()
    assert memory.stats().host_committed_bytes == 0
    assert is_filled(a)


# ---- content that does not arrive ----------------------------------------------------------------------------------------------


def test_a_restore_that_brings_other_bytes_is_found_and_undone(
    memory: Memory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, kv = filled(memory, "a"), filled(memory, "kv", policy="discard")
    memory.sleep()
    restore = device.restore_chunks

    def corrupt(images: list[ChunkImage], chunk_bytes: int, **arguments: Any) -> None:
        restore(images, chunk_bytes, **arguments)
        for image in images:
            ctypes.memset(image.device_address + 100, 0xEE, 1)
            image.checked[:] = device.hash_chunks(image.device_address, image.nbytes, chunk_bytes)  # what is read there

    with monkeypatch.context() as patch:
        patch.setattr(device, "restore_chunks", corrupt)
        with pytest.raises(DeviceError, match="1 chunks of tag 'a' are not what was put to sleep"):
            memory.wake()
    assert residencies(memory) == {"a": Residency.ASLEEP, "kv": Residency.ASLEEP}
    memory.wake()
    assert is_filled(a)
    assert kv.numel()


def test_a_restore_whose_undo_fails_too_is_still_a_state_that_a_wake_or_a_sleep_leaves(memory: Memory, device: Device) -> None:
    a = filled(memory, "a")
    for leave in ("wake", "host", "discard"):
        memory.sleep({"a": "host"})
        with Fault(device, Op.COPY), Fault(device, Op.UNMAP, count=100), pytest.raises(DeviceError) as caught:
            memory.wake()
        assert "unmap_failure" in caught.value.fields
        stats = memory.stats().tag("a")
        assert (stats.residency, stats.content) == (Residency.RESIDENT, Content.ON_HOST)
        for refused in (lambda: memory.pool("a").empty(3), lambda: memory.mark_valid("a"), lambda: memory.release_images("a")):
            with pytest.raises(StateError, match="wake"):
                refused()
        memory.check_integrity()
        if leave != "wake":
            assert memory.sleep({"a": leave}).unmapped_bytes == a.nbytes
        assert not memory.wake().noop
        assert is_filled(a) or leave == "discard"
    assert memory.stats().tag("a").content is Content.LOST


def test_a_lost_tag_may_be_filled_although_the_wake_failed_beside_it(memory: Memory, device: Device) -> None:
    a, kv = filled(memory, "a"), filled(memory, "kv", policy="discard")
    memory.sleep()
    with Fault(device, Op.COPY), Fault(device, Op.UNMAP, count=100), pytest.raises(DeviceError):
        memory.wake()
    torch.arange(kv.numel(), out=kv)
    memory.mark_valid("kv")
    assert memory.stats().tag("kv").content is Content.VALID
    memory.check_integrity()
    memory.sleep({"kv": "host"})
    memory.wake()
    assert is_filled(kv)
    assert is_filled(a)


# ---- M12: an unmap that stops half way -----------------------------------------------------------------------------------------


def half_asleep(memory: Memory, device: Device, policies: dict[str, str]) -> dict[str, str]:
    """A sleep whose second unmap fails: the first region of tag a is gone, its second and tag b are mapped."""
    with Fault(device, Op.UNMAP, 2, count=100), pytest.raises(DeviceError, match="repeat the sleep to go on, or wake") as caught:
        memory.sleep(policies)
    memory.check_integrity()
    residency: dict[str, str] = caught.value.fields["residency"]
    return residency


def test_m12_half_way_is_a_named_state_that_a_wake_leaves(memory: Memory, device: Device) -> None:
    tensors = [filled(memory, "a", MIB), filled(memory, "a", MIB), filled(memory, "b", MIB)]
    calls: list[str] = []
    for tag in ("a", "b"):
        memory.register_tag_hooks(tag, lambda tag=tag: calls.append(f"-{tag}"), lambda tag=tag: calls.append(f"+{tag}"))
    assert half_asleep(memory, device, {"a": "host", "b": "host"}) == {"a": "partial", "b": "resident"}
    assert [(t.residency, t.content) for t in memory.stats().tags] == [
        (Residency.PARTIAL, Content.ON_HOST),
        (Residency.RESIDENT, Content.VALID),
    ]
    with pytest.raises(StateError, match="partial"):
        memory.pool("a").empty(3)
    assert calls == ["-b", "-a", "+b"], "what is whole comes back at once"
    assert [t.hooks_away for t in memory.stats().tags] == [1, 0]
    memory.wake(["b"])
    assert calls == ["-b", "-a", "+b", "+b"]
    report = memory.wake()
    assert report.tags[0].mapped_bytes == MIB
    assert all(is_filled(t) for t in tensors)
    assert calls == ["-b", "-a", "+b", "+b", "+a", "+b"]


def test_m12_half_way_is_left_by_the_same_sleep_with_what_was_written_meanwhile(memory: Memory, device: Device) -> None:
    first, second, b = filled(memory, "a", MIB), filled(memory, "a", MIB), filled(memory, "b", MIB)
    half_asleep(memory, device, {"a": "host", "b": "host"})
    still = second if mapped_files(second) else first
    still[0] = 77
    report = memory.sleep({"a": "host", "b": "host"})
    assert [(t.unmapped_bytes, t.returned_bytes, t.noop) for t in report.tags] == [(MIB, MIB, False), (MIB, MIB, False)]
    memory.wake()
    assert int(still[0]) == 77
    still[0] = 0
    assert is_filled(first)
    assert is_filled(second)
    assert is_filled(b)


def test_m12_half_discarded_is_lost_and_what_was_not_reached_is_not(memory: Memory, device: Device) -> None:
    kept = [filled(memory, "a", MIB), filled(memory, "a", MIB), filled(memory, "b", MIB)]
    half_asleep(memory, device, {"a": "discard", "b": "discard"})
    assert [(t.residency, t.content) for t in memory.stats().tags] == [
        (Residency.PARTIAL, Content.LOST),
        (Residency.RESIDENT, Content.VALID),
    ]
    memory.wake()
    assert is_filled(kept[2])
    assert memory.stats().tag("a").content is Content.LOST


def test_m12_memory_that_the_driver_will_not_release_is_asked_for_again(memory: Memory, device: Device) -> None:
    a = filled(memory, "a", MIB)
    with Fault(device, Op.RELEASE, count=100), pytest.raises(DeviceError):
        memory.sleep({"a": "host"})
    assert residencies(memory) == {"a": Residency.ASLEEP}
    assert memory.stats().condemned_bytes == MIB
    assert not memory.sleep({"a": "host"}).noop
    assert memory.stats().condemned_bytes == 0
    assert memory.sleep({"a": "host"}).noop
    memory.wake()
    assert is_filled(a)


@pytest.mark.parametrize("op", [Op.UNMAP, Op.RELEASE, Op.FREE_ADDRESS])
def test_m12_a_region_that_will_not_go_is_counted_and_not_in_the_way(memory: Memory, device: Device, op: Op) -> None:
    pool = memory.pool("a")
    a = filled(memory, "a")
    with Fault(device, op, count=100):
        del a
        memory.check_integrity()
        assert (pool.stats().regions, pool.stats().allocated_bytes) == (1, 0)
        assert (pool.residency, pool.content) == (Residency.RESIDENT, Content.VALID)
        new = filled(memory, "a", MIB)
        assert pool.stats().regions == 2
    memory.sleep()
    assert pool.stats().regions == 1
    memory.wake()
    memory.check_integrity()
    assert is_filled(new)
