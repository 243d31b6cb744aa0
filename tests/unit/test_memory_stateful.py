"""M1, M4, M6, M8, M10, M12 together: any order of allocating, freeing, writing, sleeping, waking and failing keeps every byte."""

from __future__ import annotations

import contextlib

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torpor._native import Device, Op
from torpor.errors import CapacityError, DeviceError, StateError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.testing.driver import Fault

KIB = 1 << 10
CONFIG = MemoryConfig(extent_bytes=64 * KIB, chunk_bytes=8 * KIB, copy_threads=1)
POOLS = {"a": {}, "b": {"image": "release"}, "c": {"policy": "discard", "exportable": True, "guarded": True}}

tags = st.sampled_from(sorted(POOLS))
sizes = st.one_of(st.integers(1, 2000), st.integers(2000, 40 * KIB), st.integers(40 * KIB, 200 * KIB))
policies = st.dictionaries(tags, st.sampled_from(["keep", "host", "discard"]), min_size=1)
faults = st.none() | st.tuples(st.sampled_from(list(Op)), st.integers(1, 4), st.sampled_from([1, 1000]))


class Held:
    def __init__(self, tag: str, tensor: torch.Tensor) -> None:
        self.tag = tag
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.expected: torch.Tensor | None = None  # None: undefined


class Pools(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.device = Device.open("host", faults=True)
        self.memory = Memory(CONFIG, device=self.device)
        for tag, kind in POOLS.items():
            self.memory.pool(tag, **kind)  # type: ignore[arg-type]
        self.held: list[Held] = []

    def usable(self, tag: str) -> bool:
        stats = self.memory.stats().tag(tag)
        return stats.residency is Residency.RESIDENT and stats.content is not Content.ON_HOST

    @contextlib.contextmanager
    def maybe_failing(self, fault: tuple[Op, int, int] | None):  # type: ignore[no-untyped-def]
        with contextlib.suppress(DeviceError, CapacityError):
            if fault is None:
                yield
            else:
                with Fault(self.device, *fault):
                    yield

    @rule(tag=tags, size=sizes, fault=faults)
    def allocate(self, tag: str, size: int, fault: tuple[Op, int, int] | None) -> None:
        with self.maybe_failing(fault):
            try:
                self.held.append(Held(tag, self.memory.pool(tag).empty(size, torch.uint8)))
            except StateError:
                assert not self.usable(tag)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0), fault=faults)
    def free(self, which: int, fault: tuple[Op, int, int] | None) -> None:
        with self.maybe_failing(fault):
            self.held.pop(which % len(self.held))
            self.memory.check_integrity()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0), seed=st.integers(0, 255))
    def write(self, which: int, seed: int) -> None:
        held = self.held[which % len(self.held)]
        if self.usable(held.tag):
            held.tensor.copy_(torch.arange(held.tensor.numel()).add_(seed).to(torch.uint8))
            held.expected = held.tensor.clone()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0), at=st.integers(0))
    def poke(self, which: int, at: int) -> None:
        held = self.held[which % len(self.held)]
        if self.usable(held.tag) and held.expected is not None:
            held.tensor[at % held.tensor.numel()] += 1
            held.expected = held.tensor.clone()

    @rule(asked=policies, fault=faults)
    def sleep(self, asked: dict[str, str], fault: tuple[Op, int, int] | None) -> None:
        with self.maybe_failing(fault):
            try:
                self.memory.sleep(asked)
            except StateError:
                contents = {t.tag: t.content for t in self.memory.stats().tags}
                assert any(policy == "host" and contents[tag] is Content.LOST for tag, policy in asked.items())

    @rule(asked=st.none() | st.sets(tags), fault=faults)
    def wake(self, asked: set[str] | None, fault: tuple[Op, int, int] | None) -> None:
        with self.maybe_failing(fault):
            self.memory.wake(None if asked is None else sorted(asked))

    @rule(tag=tags)
    def mark_valid(self, tag: str) -> None:
        if self.usable(tag):
            self.memory.mark_valid(tag)

    @invariant()
    def what_says_it_is_valid_is(self) -> None:
        contents = {t.tag: t.content for t in self.memory.stats().tags}
        for held in self.held:
            assert held.tensor.data_ptr() == held.address
            if contents[held.tag] is Content.LOST:
                held.expected = None
            elif contents[held.tag] is Content.VALID and held.expected is not None:
                assert torch.equal(held.tensor, held.expected)

    @invariant()
    def nothing_disagrees(self) -> None:
        self.memory.check_integrity()

    def teardown(self) -> None:
        self.memory.wake()
        self.what_says_it_is_valid_is()
        self.held.clear()
        self.memory.close()
        self.device.close()


Pools.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_pools = Pools.TestCase
