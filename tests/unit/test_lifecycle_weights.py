"""Other weights for an engine that sleeps: the next wake loads them, and KV of the old ones is nobody's any more (E6, M8, P5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_driver import PROMPT, Driver

from torpor.engine.base import EngineState
from torpor.errors import ConnectorError, DeviceError, EngineDeadError, ModelError, SleepAborted, StateError, TransportError
from torpor.kvcache.prefix import root_digest
from torpor.memory import Content
from torpor.testing.engine import FakeConnector, FakeWorker

NEW = "fake@2"


class Unchanging(FakeConnector):
    """Follows sleeps, and takes the weights for those of its start."""

    supports_weight_updates = False


def told(model: str) -> list[int]:
    """What an engine says that was started with these weights."""
    driver = Driver(worker=FakeWorker(model_id=model))
    try:
        return driver.answer("reference")
    finally:
        driver.close()


@pytest.fixture
def engine() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def updated(engine: Driver, model: str = NEW) -> dict[str, Any]:
    ticket = engine.core.update_weights(model)
    engine.settle()
    return ticket.result(0)


def content(engine: Driver, tag: str) -> Content:
    return engine.core.stats().memory.tag(tag).content


@pytest.mark.parametrize("level", [1, 2])
def test_the_wake_loads_the_new_weights(engine: Driver, level: int) -> None:
    before = engine.answer("a")
    engine.slept(level=level)
    report = updated(engine)
    assert (report["operation"], report["state"], report["model_id"]) == ("update_weights", "asleep", NEW)
    assert engine.woken()["refilled_tags"] == ["weights"]
    assert engine.answer("b") == told(NEW) != before
    assert engine.core.stats().model_id == NEW


def test_m8_images_of_the_old_weights_are_given_up(engine: Driver) -> None:
    engine.slept(level=1)
    assert content(engine, "weights") is Content.ON_HOST
    updated(engine)
    weights = engine.core.stats().memory.tag("weights")
    assert (weights.content, weights.image_bytes) == (Content.LOST, 0)


def test_e6_the_prefix_cache_knows_nothing_of_the_old_weights(engine: Driver) -> None:
    engine.answer("a")
    engine.answer("b")
    assert engine.ends["b"].num_cached_tokens > 0
    engine.slept(level=2)
    updated(engine)
    engine.woken()
    engine.answer("c")
    assert engine.ends["c"].num_cached_tokens == 0
    assert engine.answer("d") == told(NEW)
    assert engine.ends["d"].num_cached_tokens > 0


def test_e6_names_of_kv_follow_the_weights(engine: Driver) -> None:
    """What keeps KV by its names, beyond a wake, must not find that of other weights under them."""
    root = engine.core.scheduler.kv._root
    engine.slept(level=2)
    updated(engine)
    assert engine.core.scheduler.kv._root == root_digest(NEW) != root


def test_a_frozen_request_goes_on_with_the_new_weights(engine: Driver) -> None:
    engine.add("a", max_tokens=8)
    engine.step(4)
    engine.slept(level=2, mode="keep")
    said = list(engine.tokens["a"])
    assert 0 < len(said) < 8
    updated(engine)
    engine.woken()
    engine.settle()
    assert engine.tokens["a"][: len(said)] == said
    other = Driver(worker=FakeWorker(model_id=NEW))
    assert engine.tokens["a"][len(said) :] == other.answer("r", 8 - len(said), [*PROMPT, *said])
    other.close()


def test_wrong_weights_change_nothing(engine: Driver) -> None:
    before = engine.answer("a")
    engine.slept(level=1)
    with pytest.raises(ModelError, match="no such file"):
        updated(engine, "elsewhere")
    assert (engine.state, content(engine, "weights")) == (EngineState.ASLEEP, Content.ON_HOST)
    assert engine.woken()["refilled_tags"] == []
    assert engine.answer("b") == before
    assert engine.core.stats().model_id == "fake@1"


def test_the_last_of_several_counts_and_the_way_back_is_open(engine: Driver) -> None:
    before = engine.answer("a")
    engine.slept(level=2)
    updated(engine)
    updated(engine, "fake@3")
    engine.woken()
    assert engine.answer("b") == told("fake@3")
    engine.slept(level=2)
    updated(engine, "fake@1")
    engine.woken()
    assert engine.answer("c") == before


def test_weights_that_cannot_be_read_leave_it_asleep_until_others_are_named(engine: Driver) -> None:
    engine.slept(level=2)
    updated(engine)
    engine.worker.fail_reload = ModelError("damaged", path="there")
    with pytest.raises(ModelError, match="damaged"):
        engine.woken()
    assert engine.core.stats().missing_tags == ("weights",)
    engine.worker.fail_reload = None
    engine.slept(level=2)
    updated(engine, "fake@3")
    engine.woken()
    assert engine.answer("b") == told("fake@3")


def test_m12_a_driver_that_fails_leaves_the_old_weights(engine: Driver) -> None:
    before = engine.answer("a")
    engine.slept(level=2)

    def fail(*args: object) -> None:
        raise DeviceError("told to fail", status="injected")

    plain, engine.worker.memory.sleep = engine.worker.memory.sleep, fail  # type: ignore[assignment, method-assign]
    with pytest.raises(DeviceError):
        updated(engine)
    engine.worker.memory.sleep = plain  # type: ignore[method-assign]
    engine.woken()
    assert engine.answer("b") == before
    assert engine.core.stats().model_id == "fake@1"


class TestWhen:
    def test_an_engine_that_is_awake_or_paused_refuses(self, engine: Driver) -> None:
        with pytest.raises(StateError, match=r"awake.*level 2"):
            updated(engine)
        ticket = engine.core.pause()
        engine.settle()
        ticket.result(0)
        with pytest.raises(StateError, match="paused"):
            updated(engine)

    @pytest.mark.parametrize("policy", ["keep", "host"])
    def test_kv_of_the_old_weights_must_be_gone(self, engine: Driver, policy: str) -> None:
        engine.slept(policies={"weights": "discard", "kv_cache": policy})
        with pytest.raises(StateError, match=r"kv_cache.*discard"):
            updated(engine)
        engine.slept(policies={"kv_cache": "discard"})
        assert updated(engine)["model_id"] == NEW

    def test_a_kv_cache_that_woke_early_must_sleep_again(self, engine: Driver) -> None:
        engine.slept(level=2)
        engine.woken(["kv_cache"])
        with pytest.raises(StateError, match="kv_cache"):
            updated(engine)

    def test_weights_that_woke_early_are_unmapped_first(self, engine: Driver) -> None:
        engine.slept(level=1)
        engine.woken(["weights"])
        updated(engine)
        assert "weights" not in engine.mapped()
        engine.woken()
        assert engine.answer("b") == told(NEW)

    def test_during_a_transaction_it_waits_its_turn(self, engine: Driver) -> None:
        sleep = engine.sleep(level=2)
        engine.step()
        assert engine.state is EngineState.SLEEPING
        update = engine.core.update_weights(NEW)
        wake = engine.core.wake_up()
        assert not update.done()
        engine.settle()
        assert sleep.result(0)["state"] == "asleep"
        assert update.result(0)["model_id"] == NEW
        assert wake.result(0)["state"] == "awake"
        assert engine.answer("b") == told(NEW)

    def test_one_that_comes_during_a_wake_finds_it_awake(self, engine: Driver) -> None:
        engine.slept(level=2)
        engine.core.wake_up()
        update = engine.core.update_weights(NEW)
        engine.settle()
        with pytest.raises(StateError, match="awake"):
            update.result(0)
        assert engine.core.stats().model_id == "fake@1"

    def test_a_drain_is_not_a_sleep_yet(self, engine: Driver) -> None:
        engine.add("a", max_tokens=50)
        engine.step(2)
        sleep = engine.sleep(level=2, mode="wait")
        assert engine.state is EngineState.DRAINING
        with pytest.raises(StateError, match="draining"):
            engine.core.update_weights(NEW).result(0)
        engine.core.wake_up()
        with pytest.raises(SleepAborted):
            sleep.result(0)

    def test_a_core_that_is_shut_down_says_so(self, engine: Driver) -> None:
        engine.core.shutdown()
        with pytest.raises(EngineDeadError):
            engine.core.update_weights(NEW).result(0)


class TestConnectors:
    def test_both_sides_are_told_before_the_engine_can_wake(self) -> None:
        engine = Driver(connector=FakeConnector)
        engine.slept(level=2)
        ticket = engine.core.update_weights(NEW)
        engine.background.run()
        engine.step()
        assert ticket.done()
        assert (engine.connector.version, engine.connector_scheduler.version) == (NEW, NEW)
        engine.close()

    def test_one_that_cannot_take_the_version_ends_the_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its KV would be the old weights', or the new ones': nobody knows. So nothing is served any more."""
        engine = Driver(connector=FakeConnector)
        engine.slept(level=2)

        def fail(version: str) -> None:
            raise TransportError("told to fail", transport="fake")

        monkeypatch.setattr(engine.connector, "set_weights_version", fail)
        ticket = engine.core.update_weights(NEW)
        with pytest.raises(TransportError):
            engine.settle()
        assert not ticket.done()
        engine.close()

    def test_one_that_does_not_follow_is_refused_by_name(self) -> None:
        engine = Driver(connector=Unchanging)
        engine.slept(level=2)
        with pytest.raises(ConnectorError, match="supports_weight_updates") as caught:
            updated(engine)
        assert caught.value.fields["connector"] == "Unchanging"
        engine.woken()
        assert engine.core.stats().model_id == "fake@1"
        engine.close()
