"""M5 where images are copied while memory is created, as on a GPU: the whole transaction, on the host driver."""

from __future__ import annotations

import pytest
import torch

from torpor._native import Device, Op
from torpor.errors import DeviceError, DeviceMemoryError, HookError
from torpor.memory import Memory, MemoryConfig, Residency
from torpor.memory.shared import Shared
from torpor.testing.driver import Fault

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "maps_beside", True)


def asleep(memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    weights = memory.pool("weights").empty(2 * MIB, torch.uint8).fill_(7)
    kv = memory.pool("kv_cache", policy="discard").zeros(3 * MIB, torch.uint8)
    memory.sleep()
    return weights, kv


def all_asleep(memory: Memory) -> bool:
    memory.check_integrity()
    return {t.residency for t in memory.stats().tags} == {Residency.ASLEEP}


def test_everything_is_there_afterwards(memory: Memory) -> None:
    weights, kv = asleep(memory)
    report = memory.wake()
    assert "create_map" not in report.phases_s
    assert [t.mapped_bytes for t in report.tags] == [2 * MIB, 3 * MIB]
    assert int(weights.min()) == int(weights.max()) == 7
    assert int(kv.sum()) == 0
    memory.check_integrity()


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
def test_m5_whichever_creation_fails_all_stay_asleep_and_the_error_speaks_of_all(
    memory: Memory, device: Device, nth: int
) -> None:
    weights, kv = asleep(memory)
    with Fault(device, Op.CREATE, nth), pytest.raises(DeviceMemoryError) as caught:
        memory.wake()
    assert caught.value.fields["bytes_needed"] == 5 * MIB
    assert caught.value.fields["bytes_free"] > 0
    assert all_asleep(memory)
    memory.wake()
    assert int(weights.min()) == 7
    assert kv.numel()


@pytest.mark.parametrize("op", [Op.MAP, Op.SET_ACCESS, Op.COPY, Op.HASH])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_m12_whatever_fails_can_be_retried(memory: Memory, device: Device, op: Op, nth: int) -> None:
    weights, kv = asleep(memory)
    with Fault(device, op, nth) as fault:
        try:
            memory.wake()
        except DeviceError:
            assert all_asleep(memory)
        else:
            assert not fault.reached
    memory.wake()
    assert int(weights.min()) == 7
    assert kv.numel()


def test_where_memory_may_be_short_all_is_asked_for_at_once(
    memory: Memory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, kv = asleep(memory)
    monkeypatch.setattr(device, "free_bytes", lambda: 4 * MIB)
    assert "create_map" in memory.wake().phases_s
    assert int(weights.min()) == 7
    assert kv.numel()


class Follower:
    """A hook that notes what it saw."""

    def __init__(self, memory: Memory, weights: torch.Tensor, tag: str) -> None:
        self.seen: list[str] = []
        self._memory, self._weights, self._tag = memory, weights, tag
        self.fails = False
        memory.register_tag_hooks(tag, before_unmap=self.let_go, after_map=self.come_back, name=f"follower of {tag}")

    def let_go(self) -> None:
        self.seen.append("let go")

    def come_back(self) -> None:
        of = {t.tag: t.residency for t in self._memory.stats().tags}
        assert of[self._tag] is Residency.RESIDENT
        self.seen.append("back, with content" if int(self._weights.min()) == 7 else "back")
        if self.fails:
            raise RuntimeError("no registration to be had")


def test_m3_hooks_of_pages_without_content_come_back_before_the_copies_have_ended(memory: Memory) -> None:
    weights, kv = asleep(memory)
    early, late = Follower(memory, weights, "kv_cache"), Follower(memory, weights, "weights")
    report = memory.wake()
    assert (early.seen, late.seen) == (["back"], ["back, with content"])
    assert report.phases_s["hooks_beside_copies"] > 0
    assert kv.numel()


@pytest.mark.parametrize("op", [Op.COPY, Op.HASH])
def test_m5_hooks_that_came_back_early_let_go_when_the_copies_fail(memory: Memory, device: Device, op: Op) -> None:
    weights, kv = asleep(memory)
    early, late = Follower(memory, weights, "kv_cache"), Follower(memory, weights, "weights")
    with Fault(device, op, 1), pytest.raises(DeviceError):
        memory.wake()
    assert all_asleep(memory)
    assert (early.seen, late.seen) == (["back", "let go"], [])
    memory.wake()
    assert (early.seen[2:], late.seen) == (["back"], ["back, with content"])
    assert int(weights.min()) == 7
    assert kv.numel()


def test_an_interrupt_inside_a_hook_is_not_lost_where_the_copies_fail_too(memory: Memory, device: Device) -> None:
    weights, kv = asleep(memory)

    def interrupt() -> None:
        raise KeyboardInterrupt

    unregister = memory.register_tag_hooks("kv_cache", after_map=interrupt, name="impatient")
    with Fault(device, Op.HASH, 1), pytest.raises(KeyboardInterrupt) as caught:
        memory.wake()
    assert isinstance(caught.value.__context__, DeviceError)
    assert all_asleep(memory)
    unregister()
    memory.wake()
    assert int(weights.min()) == 7
    assert kv.numel()


@pytest.mark.parametrize("nth", [1, 2])
def test_m12_a_failed_wake_that_cannot_be_undone_either_leaves_a_named_state(memory: Memory, device: Device, nth: int) -> None:
    memory.pool("kv_cache", policy="discard")  # unmapped before the other
    weights, kv = asleep(memory)
    with Fault(device, Op.HASH, 1):
        device.arm_fault(Op.UNMAP, nth)
        with pytest.raises(DeviceError) as caught:
            memory.wake()
    assert "unmap" in caught.value.fields["unmap_failure"]
    memory.check_integrity()
    memory.wake()
    assert int(weights.min()) == 7
    assert kv.numel()
    memory.mark_valid("kv_cache")
    memory.check_integrity()


def test_a_tensor_that_dies_in_a_hook_beside_the_copies_keeps_its_memory_until_they_have_ended(memory: Memory) -> None:
    weights, kv = asleep(memory)
    memory.wake()
    dying = [memory.pool("weights").empty(2 * MIB, torch.uint8).fill_(9)]
    memory.sleep()
    seen = []

    def grow() -> None:
        dying.clear()
        kept = memory.pool("kv_cache").zeros(MIB, torch.uint8)
        seen.append((memory.stats().tag("weights").image_bytes, kept.nbytes))

    memory.register_tag_hooks("kv_cache", after_map=grow)
    memory.wake()
    assert seen == [(4 * MIB, MIB)]
    assert int(weights.min()) == int(weights.max()) == 7
    memory.pool("kv_cache").reserve(MIB)  # any call takes back what died
    assert memory.stats().tag("weights").image_bytes == 2 * MIB
    memory.check_integrity()
    assert kv.numel()


def test_m3_a_hook_that_fails_beside_the_copies_is_reported_and_tried_again(memory: Memory) -> None:
    weights, kv = asleep(memory)
    early = Follower(memory, weights, "kv_cache")
    early.fails = True
    with pytest.raises(HookError, match="follower of kv_cache") as caught:
        memory.wake()
    assert caught.value.fields["report"].tags
    assert int(weights.min()) == 7
    early.fails = False
    memory.wake()
    assert early.seen == ["back", "back, with content"]
    assert kv.numel()


def test_m5_a_wake_that_is_interrupted_inside_a_hook_leaves_all_asleep(memory: Memory) -> None:
    weights, _kv = asleep(memory)

    def interrupt() -> None:
        raise KeyboardInterrupt

    unregister = memory.register_tag_hooks("kv_cache", after_map=interrupt, name="impatient")
    with pytest.raises(KeyboardInterrupt):
        memory.wake()
    assert all_asleep(memory)
    unregister()
    memory.wake()
    assert int(weights.min()) == 7
