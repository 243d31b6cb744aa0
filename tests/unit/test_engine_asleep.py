"""E10 and the core's own doings: requests while asleep, failed steps, aborts, stats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_driver import Driver, reference

from torpor.connectors.base import Finished
from torpor.engine.base import EngineState
from torpor.engine.config import SleepConfig
from torpor.engine.lifecycle_parts import TELL_S
from torpor.errors import AsleepError, BugError, DeviceError, DeviceMemoryError, EngineDeadError, RequestError
from torpor.request import FinishReason
from torpor.scheduler import SchedulerOutput
from torpor.testing.engine import FakeConnector


def make(while_asleep: str = "reject") -> Driver:
    return Driver(sleep=SleepConfig(enable_sleep_mode=True, while_asleep=while_asleep, retry_after_s=3))  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Driver]:
    driver = make()
    yield driver
    driver.close()


def test_e10_reject_says_when_to_come_back(engine: Driver) -> None:
    engine.slept(level=1)
    with pytest.raises(AsleepError, match=r"asleep.*retry after 3 s") as caught:
        engine.add("a")
    assert (caught.value.fields["retry_after_s"], caught.value.fields["state"]) == (3, "asleep")
    engine.core.wake_up()
    with pytest.raises(AsleepError, match="waking"):
        engine.add("a")
    engine.settle()
    assert engine.answer("a") == reference(8)


def test_e10_a_pause_is_no_sleep(engine: Driver) -> None:
    engine.core.pause()
    engine.add("a")
    engine.settle()
    engine.core.resume()
    engine.settle()
    assert engine.tokens["a"] == reference(8)


def test_e10_wait_queues_until_somebody_wakes_it() -> None:
    engine = make("wait")
    engine.slept(level=1)
    engine.add("a")
    engine.settle()
    assert (engine.state, engine.tokens) == (EngineState.ASLEEP, {})
    engine.woken()
    engine.settle()
    assert engine.tokens["a"] == reference(8)
    engine.close()


def test_e10_wake_wakes_it() -> None:
    engine = make("wake")
    engine.slept(level=2)
    engine.add("a")
    engine.settle()
    assert engine.state is EngineState.AWAKE
    assert engine.tokens["a"] == reference(8)
    engine.close()


def test_e10_a_request_during_the_drain_wakes_the_engine_after_the_sleep() -> None:
    engine = make("wake")
    engine.add("running", 8)
    engine.step()
    ticket = engine.sleep(level=1, mode="wait")
    engine.add("late")
    engine.settle()
    assert ticket.result(0)["state"] == "asleep"
    assert engine.tokens == {"running": reference(8), "late": reference(8)}
    engine.close()


def test_e10_requests_are_told_when_the_wake_they_asked_for_fails() -> None:
    engine = make("wake")
    engine.add("frozen", 20)
    engine.step(3)
    engine.slept(level=1, mode="keep")
    memory = engine.worker.memory
    real = memory.wake

    def short(tags: object = None) -> object:
        raise DeviceMemoryError("8 bytes needed, 4 free", bytes_needed=8, bytes_free=4)

    memory.wake = short  # type: ignore[method-assign, assignment]
    engine.add("a")
    engine.settle()
    assert engine.ends["a"].finish_reason is FinishReason.ERROR
    assert (engine.ends["a"].error or {})["type"] == "DeviceMemoryError"
    assert "frozen" not in engine.ends
    memory.wake = real  # type: ignore[method-assign]
    engine.add("b")
    engine.settle()
    assert (engine.tokens["b"], engine.tokens["frozen"]) == (reference(8), reference(20))
    engine.close()


def test_a_client_that_leaves_while_the_engine_sleeps_frees_its_place(engine: Driver) -> None:
    engine.add("a", 50)
    engine.step(2)
    engine.slept(level=1, mode="keep")
    engine.core.abort(["a", "unknown"])
    engine.settle()
    assert engine.ends["a"].finish_reason is FinishReason.ABORT
    engine.woken()
    engine.settle()
    assert engine.core.stats().cache.allocated_blocks == 0


def test_a_bad_request_is_refused_and_everybody_else_is_served(engine: Driver) -> None:
    engine.add("good", 8)
    with pytest.raises(RequestError):
        engine.add("empty", prompt=[])
    with pytest.raises(RequestError):
        engine.add("long", prompt=list(range(200)))
    with pytest.raises(RequestError):
        engine.add("good")
    engine.settle()
    assert engine.tokens["good"] == reference(8)


def test_a_step_that_fails_ends_its_requests_and_nobody_else(engine: Driver) -> None:
    engine.add("a", 50)
    engine.step(2)
    engine.worker.fail_next = DeviceError("out of order", operation="matmul", code=5)
    engine.step()
    assert engine.ends["a"].finish_reason is FinishReason.ERROR
    assert (engine.ends["a"].error or {})["type"] == "DeviceError"
    assert engine.core.stats().steps_failed == 1
    assert engine.answer("b") == reference(8)


def test_a_core_whose_every_step_fails_ends(engine: Driver) -> None:
    def fail(name: str) -> None:
        engine.add(name)
        engine.worker.fail_next = DeviceError("out of order", operation="matmul", code=5)
        engine.step()

    fail("a")
    fail("b")
    with pytest.raises(DeviceError):
        fail("c")


def test_e7_a_step_that_would_compute_while_asleep_is_a_bug(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add("a", 50)
    engine.step(2)
    rogue: list[SchedulerOutput] = []
    real = engine.worker.execute
    monkeypatch.setattr(engine.worker, "execute", lambda output: rogue.append(output) or real(output))
    engine.step()
    engine.slept(level=1, mode="keep")
    monkeypatch.setattr(engine.core._scheduler, "schedule", lambda: rogue[0])
    with pytest.raises(BugError, match="while the engine is asleep"):
        engine.step()


def test_stats_answer_in_every_state_with_the_memory_from_before_a_transaction(engine: Driver) -> None:
    resident = engine.core.stats().memory.tag("weights").resident_bytes
    engine.sleep(level=1)
    engine.step()
    assert engine.core.stats().state is EngineState.SLEEPING
    assert engine.core.stats().memory.tag("weights").resident_bytes == resident
    engine.settle()
    assert engine.core.stats().memory.tag("weights").resident_bytes == 0


def test_the_executor_is_left_alone_while_its_memory_moves() -> None:
    engine = Driver(connector=FakeConnector)
    engine.add("a", 1, hand_off=True)
    engine.settle_hand_off()
    engine.sleep(level=1)
    engine.step()
    assert engine.state is EngineState.SLEEPING
    assert engine.core.stats().scheduler.handed_off == 1, "there would be something to ask the connector"
    steps = engine.worker.steps
    engine.step(3)
    assert engine.worker.steps == steps
    engine.close()


def test_a_state_that_changed_is_followed_by_a_step_at_once() -> None:
    engine = make("wait")
    engine.slept(level=1)
    engine.add("a")
    ticket = engine.core.wake_up()
    engine.background.run()
    engine.step()
    assert ticket.result(0)["state"] == "awake"
    assert engine.core.wait_s() == 0
    engine.close()


def test_the_connector_is_not_asked_while_its_memory_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Driver(connector=FakeConnector)
    engine.sleep(level=1)
    engine.step()
    assert engine.state is EngineState.SLEEPING
    monkeypatch.setattr(engine.connector, "stats", lambda: 1 / 0)
    before = engine.core.stats().connector
    assert before is not None
    assert before.epoch is not None
    monkeypatch.undo()
    engine.settle()
    asleep = engine.core.stats().connector
    assert asleep is not None
    assert asleep.epoch is None
    engine.close()


def test_a_request_whose_load_has_ended_runs_without_being_nudged() -> None:
    engine = Driver(connector=FakeConnector)
    engine.add("a", load=8)
    engine.step()
    assert engine.core.stats().scheduler.loading == 1
    engine.connector.next_finished = Finished(failed=frozenset({"a"}))
    engine.step()
    assert engine.core.wait_s() == 0
    engine.settle()
    assert engine.tokens["a"] == reference(8)
    engine.close()


def test_an_idle_core_waits_and_a_busy_one_does_not() -> None:
    engine = Driver(connector=FakeConnector)
    assert engine.core.wait_s() is None
    engine.add("a", 20)
    engine.step()
    assert engine.core.wait_s() == 0
    engine.sleep(level=1, mode="keep")
    engine.step()
    assert engine.state is EngineState.SLEEPING
    assert engine.core.wait_s() == TELL_S, "the end of the transaction wakes the loop, and else nothing but what it has to tell"
    engine.settle()
    assert engine.core.wait_s() is None
    engine.woken()
    engine.settle()
    engine.add("b", prompt=[9] * 9, load=8)
    engine.step()
    assert 0 < (engine.core.wait_s() or 0) < 0.1
    engine.close()


def test_after_the_shutdown_every_call_says_so(engine: Driver) -> None:
    engine.core.shutdown()
    with pytest.raises(EngineDeadError):
        engine.add("a")
    for ticket in (engine.core.wake_up(), engine.sleep(level=1), engine.core.resume()):
        assert isinstance(ticket.exception(0), EngineDeadError)
