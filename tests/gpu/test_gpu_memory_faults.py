"""M12 on a GPU: whatever driver call fails, once or from then on, no weight byte is lost and the same call works afterwards."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch

from torpor._native import Device, Op
from torpor.errors import CapacityError, DeviceError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.testing.driver import every_fault

pytestmark = pytest.mark.gpu

KIB, MIB = 1 << 10, 1 << 20
CONFIG = MemoryConfig(driver="cuda", extent_bytes=2 * MIB, chunk_bytes=256 * KIB)
POLICIES = {"weights": "host", "kv_cache": "discard", "runtime": "host"}
OPS = [Op.CREATE, Op.MAP, Op.SET_ACCESS, Op.UNMAP, Op.RELEASE, Op.COPY, Op.HASH, Op.COMMIT]
COUNTS = pytest.mark.parametrize("count", [1, 10_000], ids=["once", "from then on"])


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory


class World:
    """Two tags whose content is kept, one in three regions that touch, and one whose content is not."""

    def __init__(self, device: Device) -> None:
        self.memory = Memory(CONFIG, device=device)
        weights, runtime = self.memory.pool("weights"), self.memory.pool("runtime", image="release")
        kv = self.memory.pool("kv_cache", policy="discard", exportable=True)
        self.kept = [
            weights.empty(2 * MIB, torch.uint8),
            weights.empty(4 * MIB, torch.uint8),
            weights.empty(3 * MIB, torch.uint8),
            runtime.empty(777, torch.uint8),
        ]
        self.kv = kv.zeros(3 * MIB, torch.uint8)
        self.write(1)
        self.released: set[str] = set()
        for tag in POLICIES:
            self.memory.register_tag_hooks(
                tag, lambda tag=tag: self.released.add(tag), lambda tag=tag: self.released.discard(tag)
            )

    @property
    def touching(self) -> int:
        """How many regions begin where another ends."""
        regions = [s.region for tag in POLICIES for s in self.memory.pool(tag).segments]
        ends = {r.address + r.nbytes for r in regions}
        return sum(r.address in ends for r in regions)

    def write(self, seed: int) -> None:
        for i, tensor in enumerate(self.kept):
            tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).mul_(seed + i).bitwise_and_(255))
        self.expected = [t.cpu().clone() for t in self.kept]

    def check(self) -> None:
        """What says that it is valid is; what was kept is not lost; who has let go is not resident."""
        self.memory.check_integrity()
        for tag in self.memory.stats().tags:
            assert tag.tag == "kv_cache" or tag.content is not Content.LOST
            assert tag.residency is Residency.RESIDENT or tag.tag in self.released
        for tensor, expected in zip(self.kept, self.expected, strict=True):
            if self.memory.pool(str(self.memory.tag_of(tensor))).content is Content.VALID:
                assert torch.equal(tensor.cpu(), expected)

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


def run(prepare: Callable[[World], object], call: Callable[[World], object], count: int) -> set[str]:
    """Which operations struck. ``call`` is made under every fault, checked, and made again without."""
    struck = set[str]()
    for fault in every_fault(OPS, driver="cuda", count=count):
        world = World(fault.device)
        prepare(world)
        with fault:
            try:
                call(world)
            except (DeviceError, CapacityError):
                struck.add(fault.op.name)
        world.check()
        call(world)
        world.check()
        world.finish()
    return struck


def nothing(world: World) -> None: ...


def touching(world: World) -> None:
    """Copies that went on from one region into the next have waited for ever, or were refused: there must be such neighbours."""
    assert world.touching >= 2
    asleep(world)


def asleep(world: World) -> None:
    world.memory.sleep(POLICIES)


def written_since(world: World) -> None:
    world.memory.sleep(POLICIES)
    world.memory.wake()
    world.memory.mark_valid("kv_cache")
    world.write(5)


def wake(world: World) -> None:
    world.memory.wake()


@COUNTS
def test_m12_first_sleep(count: int) -> None:
    assert run(nothing, asleep, count) == {"UNMAP", "RELEASE", "COPY", "HASH", "COMMIT"}


@COUNTS
def test_m12_sleep_of_what_changed(count: int) -> None:
    assert run(written_since, asleep, count) == {"UNMAP", "RELEASE", "COPY", "HASH", "COMMIT"}


@COUNTS
def test_m12_wake(count: int) -> None:
    assert run(touching, wake, count) == {"CREATE", "MAP", "SET_ACCESS", "COPY", "HASH"}


@COUNTS
def test_m12_a_wake_after_a_failed_sleep_and_a_sleep_after_a_failed_wake(count: int) -> None:
    for first, second in ((asleep, wake), (wake, asleep)):
        for fault in every_fault(OPS, driver="cuda", count=count):
            world = World(fault.device)
            if first is wake:
                asleep(world)
            with fault, contextlib.suppress(DeviceError, CapacityError):
                first(world)
            world.check()
            second(world)
            world.check()
            world.finish()
