"""The sleep transaction: M2 (hooks before the unmap), M4 (images complete and checked first), M7 (clean sleep), M8, M9."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from torpor._native import ChunkImage, Device, Op
from torpor.errors import ConfigurationError, DeviceError, HookError, HostMemoryError, StateError, UnknownTagError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.memory.procfs import read_mappings, resident_bytes
from torpor.testing.driver import Fault

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=CHUNK, copy_threads=2)


def filled(memory: Memory, tag: str, nbytes: int = 2 * MIB, **settings: Any) -> torch.Tensor:
    tensor = memory.pool(tag, **settings).empty(nbytes // 8, torch.int64)
    return torch.arange(tensor.numel(), out=tensor)


def is_filled(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, torch.arange(tensor.numel()))


def mapped_files(tensor: torch.Tensor) -> int:
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return sum(bool(m.inode[1]) and m.start < end and m.end > start for m in read_mappings())


class Journal:
    """Registers hooks that write down what ran, and how many memory files their tag's tensor had then."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.lines: list[str] = []

    def hook(self, tag: str, name: str, tensor: torch.Tensor, fail: str = "") -> None:
        def note(phase: str) -> None:
            self.lines.append(f"{phase} {name} {'mapped' if mapped_files(tensor) else 'gone'}")
            if phase in fail:
                raise RuntimeError(f"{name} cannot {phase}")

        self.memory.register_tag_hooks(tag, lambda: note("before"), lambda: note("after"), name=name)


# ---- the content and the kernel ------------------------------------------------------------------------------------------------


def test_a_sleep_gives_pages_back_to_the_kernel_and_a_wake_restores_the_bytes(memory: Memory) -> None:
    t = filled(memory, "weights")
    span = t.data_ptr(), t.data_ptr() + t.nbytes
    assert resident_bytes(*span) == t.nbytes
    report = memory.sleep({"weights": "host"})
    assert (resident_bytes(*span), mapped_files(t)) == (0, 0)
    assert (report.unmapped_bytes, report.returned_bytes, report.held_bytes) == (t.nbytes, t.nbytes, 0)
    assert report.tags[0].image_bytes == report.tags[0].copied_bytes == t.nbytes
    assert {"hooks", "commit", "save", "unmap", "account"} <= report.phases_s.keys()
    stats = memory.stats().tag("weights")
    assert (stats.residency, stats.content, stats.resident_bytes) == (Residency.ASLEEP, Content.ON_HOST, 0)
    memory.check_integrity()
    wake = memory.wake()
    assert (wake.tags[0].mapped_bytes, wake.tags[0].restored_bytes) == (t.nbytes, t.nbytes)
    assert is_filled(t)
    assert (memory.stats().sleeps, memory.stats().wakes) == (1, 1)


def test_tags_not_named_are_kept_and_a_sleep_without_policies_uses_the_pools_own(memory: Memory) -> None:
    weights, kv = filled(memory, "weights"), filled(memory, "kv_cache", policy="discard")
    runtime = filled(memory, "runtime", policy="keep")
    memory.sleep({"kv_cache": "discard"})
    assert (mapped_files(weights) > 0, mapped_files(kv)) == (True, 0)
    memory.wake()
    report = memory.sleep()
    assert [(t.tag, t.policy, t.noop) for t in report.tags] == [
        ("weights", "host", False),
        ("kv_cache", "discard", False),
        ("runtime", "keep", True),
    ]
    assert (mapped_files(weights), mapped_files(kv), mapped_files(runtime) > 0) == (0, 0, True)


def test_discarded_content_is_lost_until_its_owner_says_otherwise(memory: Memory) -> None:
    kv = filled(memory, "kv_cache")
    memory.sleep({"kv_cache": "discard"})
    assert memory.stats().host_committed_bytes == 0
    assert memory.stats().tag("kv_cache").content is Content.LOST
    with pytest.raises(StateError, match="wake"):
        memory.mark_valid("kv_cache")
    assert memory.wake().tags[0].content is Content.LOST
    assert int(kv.sum()) == 0
    with pytest.raises(StateError, match="nothing to copy"):
        memory.sleep({"kv_cache": "host"})
    memory.mark_valid("kv_cache")
    assert memory.stats().tag("kv_cache").content is Content.VALID


def test_only_chunks_with_tensors_in_them_are_copied(memory: Memory) -> None:
    pool = memory.pool("weights")
    pool.reserve(MIB)
    tensors = [pool.zeros(100 * KIB, torch.uint8), pool.zeros(10, torch.uint8)]
    report = memory.sleep().tags[0]
    assert report.unmapped_bytes == MIB
    assert report.image_bytes == 2 * CHUNK
    assert len(tensors) == 2


# ---- M2 ------------------------------------------------------------------------------------------------------------------------


def test_m2_every_hook_runs_newest_first_before_anything_is_unmapped(memory: Memory) -> None:
    a, b, kept = filled(memory, "a"), filled(memory, "b"), filled(memory, "kept")
    journal = Journal(memory)
    journal.hook("a", "a1", b)
    journal.hook("b", "b1", a)
    journal.hook("kept", "k1", kept)
    journal.hook("a", "a2", b)
    memory.sleep({"a": "discard", "b": "host"})
    assert journal.lines == ["before a2 mapped", "before b1 mapped", "before a1 mapped"]


def test_m2_one_that_raises_undoes_the_others_and_everything_stays_mapped(memory: Memory, device: Device) -> None:
    a, b = filled(memory, "a"), filled(memory, "b")
    journal = Journal(memory)
    for tag, name, fail in (("a", "oldest", ""), ("b", "bad", "before"), ("a", "middle", ""), ("b", "newest", "")):
        journal.hook(tag, name, a, fail)
    unmaps = device.fault_calls(Op.UNMAP)
    with pytest.raises(HookError, match=r"hook 'bad' of tag 'b' failed in before_unmap.*nothing was unmapped") as caught:
        memory.sleep({"a": "host", "b": "discard"})
    assert caught.value.fields == {"hook": "bad", "tag": "b", "phase": "before_unmap", "undo_failures": ()}
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [line.rsplit(" ", 1)[0] for line in journal.lines] == [
        "before newest",
        "before middle",
        "before bad",
        "after middle",
        "after newest",
    ]
    assert device.fault_calls(Op.UNMAP) == unmaps
    assert memory.stats().tag("b").content is Content.VALID
    assert is_filled(a)
    assert is_filled(b)
    memory.check_integrity()


def test_m2_an_undo_that_fails_is_reported_and_the_next_wake_retries_it(memory: Memory) -> None:
    a = filled(memory, "a")
    journal = Journal(memory)
    journal.hook("a", "bad", a, fail="before")
    journal.hook("a", "stuck", a, fail="after")
    with pytest.raises(HookError) as caught:
        memory.sleep({"a": "host"})
    assert caught.value.fields["hook"] == "bad"
    assert caught.value.fields["undo_failures"] == ("stuck: RuntimeError('stuck cannot after')",)
    journal.lines.clear()
    with pytest.raises(HookError, match="'stuck'"):
        memory.wake()
    assert journal.lines == ["after bad mapped", "after stuck mapped"]


def test_m2_an_interrupt_in_a_hook_undoes_the_others_and_passes_through(memory: Memory) -> None:
    a = filled(memory, "a")
    journal = Journal(memory)

    def interrupt() -> None:
        raise KeyboardInterrupt

    memory.register_tag_hooks("a", interrupt)
    journal.hook("a", "newer", a)
    with pytest.raises(KeyboardInterrupt):
        memory.sleep()
    assert journal.lines == ["before newer mapped", "after newer mapped"]
    assert memory.pool("a").residency is Residency.RESIDENT


def test_hooks_run_only_for_tags_that_lose_memory_and_only_while_registered(memory: Memory) -> None:
    calls: list[str] = []
    memory.register_tag_hooks("a", lambda: calls.append("a1"))
    unregister = memory.register_tag_hooks("a", lambda: calls.append("a2"))
    memory.register_tag_hooks("b", lambda: calls.append("b"))  # before there is such a pool
    kept = filled(memory, "a"), filled(memory, "b")
    assert [memory.stats().tag(tag).hooks for tag in ("a", "b")] == [2, 1]
    memory.sleep({"a": "keep"})
    assert calls == []
    memory.sleep({"a": "host"})
    memory.sleep({"a": "host"})
    memory.sleep({"a": "discard", "b": "host"})
    assert calls == ["a2", "a1", "b"]
    memory.wake()
    unregister()
    unregister()
    memory.sleep({"a": "discard"})
    assert calls == ["a2", "a1", "b", "a1"]
    assert kept


# ---- M4 ------------------------------------------------------------------------------------------------------------------------


def test_m4_no_host_memory_leaves_everything_mapped_and_undoes_the_hooks(device: Device) -> None:
    config = MemoryConfig(extent_bytes=MIB, chunk_bytes=CHUNK, host_limit_bytes=3 * MIB)
    with Memory(config, device=device) as memory:
        weights, runtime = filled(memory, "weights"), filled(memory, "runtime")
        journal = Journal(memory)
        journal.hook("weights", "h", weights)
        with pytest.raises(HostMemoryError, match="host_limit_bytes=3145728") as caught:
            memory.sleep({"weights": "host", "runtime": "host"})
        assert (caught.value.fields["bytes_needed"], caught.value.fields["bytes_free"]) == (4 * MIB, 3 * MIB)
        assert journal.lines == ["before h mapped", "after h mapped"]
        assert memory.stats().host_committed_bytes == 0
        assert is_filled(weights)
        assert is_filled(runtime)
        memory.sleep({"weights": "host", "runtime": "discard"})
        memory.wake()
        assert is_filled(weights)


def test_m4_the_machine_having_no_memory_is_the_same(memory: Memory, device: Device) -> None:
    a, b = filled(memory, "a"), filled(memory, "b")
    for nth in (1, 2):
        with Fault(device, Op.COMMIT, nth), pytest.raises(HostMemoryError):
            memory.sleep()
        assert (memory.stats().host_committed_bytes, device.fault_calls(Op.UNMAP)) == (0, 0)
        memory.check_integrity()
    memory.sleep()
    memory.wake()
    assert is_filled(a)
    assert is_filled(b)


def test_m4_host_memory_that_was_got_for_a_failed_sleep_is_given_back(memory: Memory, device: Device) -> None:
    pool = memory.pool("a")
    pool.reserve(MIB)
    old = pool.zeros(CHUNK, torch.uint8)
    memory.sleep()
    memory.wake()
    new = pool.zeros(CHUNK, torch.uint8)  # its chunk is new to an image that exists
    b = filled(memory, "b")
    with Fault(device, Op.COMMIT, 2), pytest.raises(HostMemoryError):
        memory.sleep()
    assert memory.stats().host_committed_bytes == CHUNK
    memory.check_integrity()
    assert memory.sleep().tags[0].copied_bytes == CHUNK
    memory.wake()
    assert is_filled(b)
    assert int(old.sum() + new.sum()) == 0


@pytest.mark.parametrize("op", [Op.HASH, Op.COPY])
def test_m4_every_copy_is_complete_before_the_first_unmap(memory: Memory, device: Device, op: Op) -> None:
    kv, a, b = filled(memory, "kv", policy="discard"), filled(memory, "a"), filled(memory, "b")
    if op is Op.HASH:  # asked only where an image may be right already
        memory.sleep()
        memory.wake()
        memory.mark_valid("kv")
        torch.arange(kv.numel(), out=kv)
    unmaps = device.fault_calls(Op.UNMAP)
    failures = 0
    for nth in range(1, 100):
        with Fault(device, op, nth) as fault:
            try:
                memory.sleep()
            except DeviceError:
                failures += 1
                assert device.fault_calls(Op.UNMAP) == unmaps
                assert is_filled(kv)
                assert is_filled(a)
                assert is_filled(b)
                memory.check_integrity()
        if not fault.reached:
            break
    assert failures == nth - 1 > 0
    memory.wake()
    assert is_filled(a)
    assert is_filled(b)


def test_m4_a_copy_that_went_wrong_is_found_before_the_unmap(
    memory: Memory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = filled(memory, "a")
    save = device.save_chunks

    def corrupt(images: list[ChunkImage], chunk_bytes: int, **arguments: Any) -> None:
        save(images, chunk_bytes, **arguments)
        for image in images:
            ctypes.memset(image.host_address + 100, 0xEE, 1)
            found = device.hash_chunks(image.host_address, image.nbytes, chunk_bytes, on_host=True)
            image.checked[:] = found  # what is read there

    with monkeypatch.context() as patch:
        patch.setattr(device, "save_chunks", corrupt)
        with pytest.raises(DeviceError, match="changed its bytes"):
            memory.sleep()
    assert mapped_files(a)
    assert is_filled(a)
    memory.sleep()
    memory.wake()
    assert is_filled(a)


@pytest.mark.parametrize("nth", [1, 5, 20])
def test_m4_an_image_half_overwritten_by_a_failed_sleep_is_not_believed(memory: Memory, device: Device, nth: int) -> None:
    a = filled(memory, "a")
    memory.sleep()
    memory.wake()
    old = a.clone()
    a += 1
    with Fault(device, Op.COPY, nth), pytest.raises(DeviceError):  # half a chunk is copied
        memory.sleep()
    memory.check_integrity()
    a.copy_(old)
    assert memory.sleep().tags[0].copied_bytes >= CHUNK
    memory.wake()
    assert torch.equal(a, old)


def test_m4_somebody_who_keeps_writing_is_told(memory: Memory, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = filled(memory, "a"), filled(memory, "b")
    save = device.save_chunks

    def save_while_written(images: list[ChunkImage], chunk_bytes: int, **arguments: Any) -> None:
        save(images, chunk_bytes, **arguments)
        for image in images:
            if (
                image.device_address == b.data_ptr()
            ):  # hashed, then written, then copied: what a device that works in steps may see
                b[1000] += 1
                image.source[0] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(device, "save_chunks", save_while_written)
        with pytest.raises(StateError, match=r"\['b'\] are being written"):
            memory.sleep()
    assert is_filled(a)
    written = b.clone()
    memory.sleep()
    memory.wake()
    assert torch.equal(b, written)


# ---- M7 ------------------------------------------------------------------------------------------------------------------------


def test_m7_only_what_changed_since_its_image_is_copied(memory: Memory, device: Device) -> None:
    a = filled(memory, "a")
    assert memory.sleep().tags[0].copied_bytes == a.nbytes
    memory.wake()
    copies = device.fault_calls(Op.COPY)
    clean = memory.sleep().tags[0]
    assert (clean.copied_bytes, clean.image_bytes) == (0, a.nbytes)
    assert device.fault_calls(Op.COPY) == copies, "what the report says is what the driver did"
    memory.wake()
    a[5] = -1
    a[-1] = -2
    assert memory.sleep().tags[0].copied_bytes == 2 * CHUNK
    memory.wake()
    assert (int(a[5]), int(a[-1])) == (-1, -2)
    assert torch.equal(a[6:-1], torch.arange(6, a.numel() - 1))


def test_m7_a_change_that_nothing_reports_is_found_by_its_bytes(memory: Memory) -> None:
    a = filled(memory, "a")
    memory.sleep()
    memory.wake()
    ctypes.memset(a.data_ptr() + 3 * CHUNK + 17, 0x5A, 1)
    expected = a.clone()
    assert memory.sleep().tags[0].copied_bytes == CHUNK
    memory.wake()
    assert torch.equal(a, expected)


def test_m7_writing_the_same_bytes_again_is_no_change(memory: Memory) -> None:
    a = filled(memory, "a")
    memory.sleep()
    memory.wake()
    a.copy_(a.clone())
    assert memory.sleep().tags[0].copied_bytes == 0


# ---- M8, M9 --------------------------------------------------------------------------------------------------------------------


def test_m8_on_host_becomes_lost_without_waking_and_gives_host_memory_back(memory: Memory) -> None:
    a = filled(memory, "a")
    memory.sleep({"a": "host"})
    assert memory.stats().host_committed_bytes == a.nbytes
    report = memory.sleep({"a": "discard"}).tags[0]
    assert (report.noop, report.unmapped_bytes, report.image_bytes) == (False, 0, 0)
    assert memory.stats().host_committed_bytes == 0
    assert memory.stats().tag("a").content is Content.LOST
    memory.check_integrity()
    assert memory.wake().tags[0].content is Content.LOST


def test_m8_keep_leaves_a_sleeping_tag_as_it_is(memory: Memory) -> None:
    a = filled(memory, "a")
    memory.sleep({"a": "host"})
    assert memory.sleep({"a": "keep"}).noop
    assert memory.stats().tag("a").residency is Residency.ASLEEP
    memory.wake()
    assert is_filled(a)


def test_m8_lost_cannot_become_on_host(memory: Memory) -> None:
    filled_tensor = filled(memory, "a")
    memory.sleep({"a": "discard"})
    with pytest.raises(StateError, match="the content of tag 'a' is lost") as caught:
        memory.sleep({"a": "host"})
    assert caught.value.fields["state"] == "asleep"
    assert filled_tensor.numel()


def test_m9_repeating_a_finished_move_says_so(memory: Memory, device: Device) -> None:
    a, b = filled(memory, "a"), filled(memory, "b")
    first = memory.sleep({"a": "host", "b": "discard"})
    unmaps = device.fault_calls(Op.UNMAP)
    again = memory.sleep({"a": "host", "b": "discard"})
    assert (first.noop, again.noop, again.unmapped_bytes) == (False, True, 0)
    assert again.tags[0].image_bytes == a.nbytes
    assert device.fault_calls(Op.UNMAP) == unmaps
    assert not memory.wake().noop
    wake = memory.wake()
    assert (wake.noop, wake.tags[0].mapped_bytes, wake.tags[0].content) == (True, 0, Content.VALID)
    assert (memory.stats().sleeps, memory.stats().wakes) == (1, 1)
    assert b.numel()


def test_m9_unknown_tags_and_policies_are_refused_before_anything_happens(memory: Memory) -> None:
    a = filled(memory, "a")
    calls: list[str] = []
    memory.register_tag_hooks("a", lambda: calls.append("before"))
    with pytest.raises(UnknownTagError, match="tag 'weihgts' is not known; known: a") as caught:
        memory.sleep({"a": "host", "weihgts": "host"})
    assert caught.value.fields == {"tag": "weihgts", "known": ("a",)}
    with pytest.raises(ConfigurationError, match="policy 'drop' for tag 'a' is not known; known: keep, host, discard"):
        memory.sleep({"a": "drop"})
    for refused in (lambda: memory.wake(["b"]), lambda: memory.exports("b"), lambda: memory.mark_valid("b")):
        with pytest.raises(UnknownTagError):
            refused()
    with Memory(CONFIG, device=memory.device) as without_pools, pytest.raises(UnknownTagError, match="known: none"):
        without_pools.sleep({"x": "host"})
    with pytest.raises(ConfigurationError, match="needs before_unmap, after_map or both"):
        memory.register_tag_hooks("a")
    assert calls == []
    assert is_filled(a)
