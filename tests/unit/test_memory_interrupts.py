"""M12 for interrupts: wherever a Ctrl-C comes, nothing is uncounted, and what follows goes on from there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from interrupts import Interrupt, every_interrupt

from torpor._native import Device
from torpor.errors import TorporError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.memory.shared import Shared
from torpor.testing.driver import nothing_leaks

MIB = 1 << 20
CONFIG = MemoryConfig(driver="host", extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2, share_images=True)
SIZE = 3 * MIB


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Looking for leaks collects, often: not what all of torch consists of."""
    gc.freeze()
    yield
    gc.unfreeze()


def content() -> torch.Tensor:
    return torch.arange(SIZE).remainder(251).to(torch.uint8)


class Engine:
    """A memory with weights, a runtime and a KV cache, each with a hook."""

    def __init__(self, device: Device) -> None:
        self.memory = Memory(CONFIG, device=device)
        self.weights = self.memory.pool("weights").empty(SIZE, torch.uint8).copy_(content())
        self.runtime = self.memory.pool("runtime").empty(100, torch.uint8).fill_(3)
        self.kv = self.memory.pool("kv_cache", policy="discard", exportable=True).empty(2 * MIB, torch.uint8)
        for tag in self.memory.tags:
            self.memory.register_tag_hooks(tag, lambda: None, lambda: None)

    def cycle(self) -> None:
        self.memory.sleep()
        self.memory.wake()

    def check_accounts(self) -> None:
        stats = self.memory.stats()
        assert stats.host_committed_bytes == sum(t.image_bytes for t in stats.tags)
        self.memory.check_integrity()

    def check_awake(self, undefined: bool) -> None:
        stats = self.memory.stats()
        assert [(t.residency, t.hooks_away) for t in stats.tags] == [(Residency.RESIDENT, 0)] * 3
        assert stats.tag("weights").content is Content.VALID
        assert undefined or torch.equal(self.weights, content())
        if stats.tag("runtime").content is Content.VALID:
            assert self.runtime.eq(3).all()

    def check_goes_on(self) -> None:
        self.weights.copy_(content())
        self.runtime.fill_(3)
        for tag in self.memory.tags:
            self.memory.mark_valid(tag)
        self.cycle()
        self.check_accounts()
        assert torch.equal(self.weights, content())
        assert self.runtime.eq(3).all()


def prepares(engine: Engine) -> None:
    engine.memory.prepare_images(fill=True)
    engine.weights[0] += 1
    engine.weights[0] -= 1
    engine.memory.sleep()
    engine.memory.sleep({"kv_cache": "discard", "runtime": "discard", "weights": "host"})
    engine.memory.wake()


def releases(engine: Engine) -> None:
    engine.memory.prepare_images(fill=True)
    engine.memory.release_images("weights")
    engine.cycle()
    engine.memory.release_images("weights")


def shares(engine: Engine) -> None:
    engine.memory.share_images("weights")
    engine.weights[0] += 1
    engine.weights[0] -= 1
    engine.cycle()


def loads(engine: Engine) -> None:
    engine.memory.take_ahead(4 * MIB)
    with engine.memory.load_in_steps([engine.weights]) as staging:
        staging.ready(0)
        staging.tensors[0].copy_(content())
        staging.written(0)
    engine.memory.end_ahead()
    engine.cycle()


def allocates(engine: Engine) -> None:
    more = engine.memory.pool("runtime").empty(SIZE, torch.uint8)
    engine.memory.sleep()
    del more
    engine.memory.wake(["runtime"])
    engine.memory.wake()


SCENARIOS = [Engine.cycle, prepares, releases, shares, loads, allocates]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_m12_an_interrupt_in_any_native_call(
    scenario: Callable[[Engine], None], beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
    monkeypatch.setattr(Shared, "maps_beside", beside)
    for interrupt in every_interrupt():
        try:
            with nothing_leaks():
                leaves_nothing(scenario, interrupt)
        except (AssertionError, TorporError) as error:
            raise AssertionError(f"after {interrupt}") from error


def leaves_nothing(scenario: Callable[[Engine], None], interrupt: Interrupt) -> None:
    device = Device.open("host")
    comes_through(Engine(device), scenario, interrupt)
    left = device.stats()
    assert (left.live_regions, left.live_arenas, left.committed_bytes, left.spare_bytes) == (0, 0, 0, 0)
    device.close()


def comes_through(engine: Engine, scenario: Callable[[Engine], None], interrupt: Interrupt) -> None:
    with interrupt:
        try:
            scenario(engine)
        except KeyboardInterrupt:
            assert interrupt.reached
    engine.check_accounts()
    engine.memory.wake()
    engine.check_awake(undefined=scenario is loads)
    engine.check_goes_on()
    engine.memory.close()
