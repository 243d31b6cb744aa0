"""M12, M4, M5: whatever driver call fails, once or from then on, the pools are in a state with a name, no weight byte is lost,
the same call works once the driver does, and nothing leaks."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from torpor._native import Device, Op
from torpor.errors import CapacityError, DeviceError, TorporError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.testing.driver import every_fault, nothing_leaks

KIB = 1 << 10
CONFIG = MemoryConfig(extent_bytes=64 * KIB, chunk_bytes=16 * KIB, copy_threads=2)
POLICIES = {"weights": "host", "kv_cache": "discard", "runtime": "host"}
RESIDENT_OPS = [Op.CREATE, Op.MAP, Op.SET_ACCESS, Op.UNMAP, Op.RELEASE, Op.COPY, Op.HASH, Op.COMMIT]
OF_A_SLEEP = {"UNMAP", "RELEASE", "COPY", "HASH", "COMMIT"}
OF_A_WAKE = {"CREATE", "MAP", "SET_ACCESS", "COPY", "HASH"}
COUNTS = pytest.mark.parametrize("count", [1, 10_000], ids=["once", "from then on"])


class World:
    """Three tags, two regions each in the first, with hooks that must never see their tag's memory half there."""

    def __init__(self, device: Device) -> None:
        self.memory = Memory(CONFIG, device=device)
        weights = self.memory.pool("weights")
        kv = self.memory.pool("kv_cache", policy="discard", exportable=True, guarded=True)
        runtime = self.memory.pool("runtime", image="release")
        self.kept = [
            weights.empty(100 * KIB, torch.uint8),
            weights.empty(130 * KIB, torch.uint8),
            runtime.empty(777, torch.uint8),
        ]
        self.kv = kv.zeros(100 * KIB, torch.uint8)
        self.expected: list[torch.Tensor] = []
        self.write(1)
        self.released: set[str] = set()
        for tag in POLICIES:
            self.memory.register_tag_hooks(tag, lambda tag=tag: self._hook(tag, True), lambda tag=tag: self._hook(tag, False))

    def _hook(self, tag: str, release: bool) -> None:
        residency = self.memory.stats().tag(tag).residency
        # A retried sleep asks again for the hooks of a tag that an earlier one left half way.
        assert residency is Residency.RESIDENT or (release and residency is Residency.PARTIAL)
        (self.released.add if release else self.released.discard)(tag)

    def write(self, seed: int) -> None:
        for i, tensor in enumerate(self.kept):
            tensor.copy_(torch.arange(tensor.numel()).mul_(seed + i).to(torch.uint8))
        self.expected = [t.clone() for t in self.kept]

    def check(self) -> None:
        self.memory.check_integrity()
        stats = self.memory.stats()
        for tag in stats.tags:
            assert tag.tag == "kv_cache" or tag.content is not Content.LOST
            assert tag.residency is Residency.RESIDENT or tag.tag in self.released
        self.check_bytes()

    def check_bytes(self) -> None:
        """What says that it is valid is."""
        for tensor, expected in zip(self.kept, self.expected, strict=True):
            tag = self.memory.tag_of(tensor)
            assert tag is not None
            if self.memory.pool(tag).content is Content.VALID:
                assert torch.equal(tensor, expected)

    def finish(self) -> None:
        self.memory.wake()
        self.check()
        assert all(t.residency is Residency.RESIDENT for t in self.memory.stats().tags)
        assert self.released == set()
        assert self.memory.device.stats().condemned_bytes == 0
        self.kept.clear()
        del self.kv
        gc.collect()
        self.memory.close()


def run(prepare: Callable[[World], None], call: Callable[[World], object], ops: list[Op], count: int) -> Counter[str]:
    """How often a fault of each operation struck. ``call`` is made under the fault, checked, and made again without."""
    struck = Counter[str]()
    with nothing_leaks():
        for fault in every_fault(ops, count=count):
            world = World(fault.device)
            prepare(world)
            failed = False
            with fault:
                try:
                    call(world)
                except (DeviceError, CapacityError):
                    failed = True
            world.check()
            struck[fault.op.name] += failed
            call(world)
            world.check()
            world.finish()
    return +struck


def nothing(world: World) -> None: ...


def asleep(world: World) -> None:
    world.memory.sleep(POLICIES)


def written_since(world: World) -> None:
    world.memory.sleep(POLICIES)
    world.memory.wake()
    world.memory.mark_valid("kv_cache")
    world.write(5)


@COUNTS
def test_m12_first_sleep(count: int) -> None:
    assert set(run(nothing, asleep, RESIDENT_OPS, count)) == OF_A_SLEEP - {"HASH"}  # there is no image to compare with


@COUNTS
def test_m12_sleep_of_what_changed(count: int) -> None:
    assert set(run(written_since, asleep, RESIDENT_OPS, count)) == OF_A_SLEEP


@COUNTS
def test_m12_wake(count: int) -> None:
    assert set(run(asleep, lambda world: world.memory.wake(), RESIDENT_OPS, count)) == OF_A_WAKE


@COUNTS
def test_m12_wake_of_one_tag(count: int) -> None:
    assert set(run(asleep, lambda world: world.memory.wake(["weights"]), RESIDENT_OPS, count)) == OF_A_WAKE


@COUNTS
def test_m12_discard_while_asleep(count: int) -> None:
    def discard(world: World) -> None:
        world.memory.sleep({"runtime": "host", "kv_cache": "discard"})

    assert set(run(asleep, discard, RESIDENT_OPS, count)) == set()  # the driver is not asked


@COUNTS
def test_m12_a_wake_after_a_sleep_that_failed_goes_back(count: int) -> None:
    with nothing_leaks():
        for fault in every_fault(RESIDENT_OPS, count=count):
            world = World(fault.device)
            with fault, contextlib.suppress(DeviceError, CapacityError):
                world.memory.sleep(POLICIES)
            world.check()
            world.memory.wake()
            world.check()
            world.finish()


@COUNTS
def test_m12_a_sleep_after_a_wake_that_failed_goes_back(count: int) -> None:
    with nothing_leaks():
        for fault in every_fault(RESIDENT_OPS, count=count):
            world = World(fault.device)
            world.memory.sleep(POLICIES)
            with fault, contextlib.suppress(DeviceError, CapacityError):
                world.memory.wake()
            world.check()
            world.memory.sleep(POLICIES)
            assert all(t.residency is Residency.ASLEEP for t in world.memory.stats().tags)
            world.check()
            world.finish()


@COUNTS
def test_m12_allocating(count: int) -> None:
    with nothing_leaks():
        for fault in every_fault(count=count):
            world = World(fault.device)
            before = world.memory.stats()
            with fault, contextlib.suppress(TorporError):
                world.kept.append(world.memory.pool("weights").empty(200 * KIB, torch.uint8))
                world.expected.append(world.kept[-1].fill_(3).clone())
            if len(world.kept) == 3:
                assert world.memory.stats() == before
            world.check()
            world.finish()


@COUNTS
@pytest.mark.parametrize("sleeping", [False, True], ids=["resident", "asleep"])
def test_m12_freeing_and_closing(count: int, sleeping: bool) -> None:
    with nothing_leaks():
        for fault in every_fault(count=count):
            world = World(fault.device)
            if sleeping:
                world.memory.sleep(POLICIES)
            with fault:
                world.kept.clear()
                world.expected.clear()
                del world.kv
                gc.collect()
                world.memory.check_integrity()
                with contextlib.suppress(DeviceError):
                    world.memory.close()
            world.memory.close()
