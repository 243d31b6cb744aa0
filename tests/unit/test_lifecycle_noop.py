"""M9: ``noop`` in a report says that the call has changed nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_driver import Driver

from torpor.engine.base import EngineState
from torpor.errors import HookError

LONG = 30


@pytest.fixture
def engine() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def test_m9_repeating_a_finished_move_says_so(engine: Driver) -> None:
    engine.slept(level=1)
    assert engine.slept(level=1)["noop"] is True
    assert engine.slept(level=0)["noop"] is True
    engine.woken()
    assert engine.woken()["noop"] is True
    assert engine.core.resume().result(0)["noop"] is True
    engine.core.pause()
    engine.settle()
    assert engine.core.pause().result(0)["noop"] is True


def test_a_wake_that_ends_a_pause_has_done_something(engine: Driver) -> None:
    engine.core.pause()
    engine.settle()
    woken = engine.woken()
    assert (woken["state"], woken["noop"], woken["reason"]) == ("awake", False, "resumed; nothing was asleep")


@pytest.mark.parametrize("call", ["wake_up", "resume"])
def test_m9_what_cancels_a_pause_that_drains_has_done_something(engine: Driver, call: str) -> None:
    engine.add("a", LONG)
    engine.step(2)
    engine.core.pause("wait")
    assert engine.state is EngineState.DRAINING
    report = getattr(engine.core, call)().result(0)
    assert (report["state"], report["noop"], report["reason"]) == ("awake", False, "cancelled the pause that was draining")


@pytest.mark.parametrize("asleep", [True, False])
@pytest.mark.parametrize("requests", [True, False])
def test_m9_an_abort_that_ends_nobody_has_done_nothing(engine: Driver, asleep: bool, requests: bool) -> None:
    if requests:
        engine.add("a", LONG)
        engine.step(2)
    engine.slept(level=1 if asleep else 0, mode="keep")
    report = engine.slept(level=1 if asleep else 0, mode="abort")
    assert (report["noop"], set(engine.ends)) == (not requests, {"a"} if requests else set())
    assert engine.core.pause("abort").result(0)["noop"] if asleep else engine.slept(level=0, mode="abort")["noop"]


def test_m9_a_wake_of_a_pool_that_is_back_changes_nothing_while_others_are_missing(engine: Driver) -> None:
    engine.slept(policies={"kv_cache": "discard"})
    assert engine.woken(["weights"])["noop"] is True
    assert engine.woken()["noop"] is False


def test_m9_a_wake_that_only_opens_the_engine_has_done_something(engine: Driver) -> None:
    """Everything was mapped, and a hook had not come back (M3)."""
    broken = [True]
    engine.worker.memory.register_tag_hooks("runtime", after_map=lambda: 1 / 0 if broken[0] else None, name="late")
    engine.slept(level=1)
    with pytest.raises(HookError):
        engine.woken()
    broken[0] = False
    report = engine.woken()
    assert (report["state"], report["noop"], report["mapped_bytes"]) == ("awake", False, 0)
