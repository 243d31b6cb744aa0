"""E2, E3, E6, E8: drains, modes, deadlines, and who may cancel what. Real pools, a fake model that reads them, manual time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from engine_driver import Driver, reference

from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.config import SleepConfig
from torpor.engine.lifecycle import MOVES
from torpor.errors import AsleepError, ConfigurationError, SleepAborted, StateError, UnknownTagError
from torpor.request import FinishReason
from torpor.testing.engine import FakeConnector

POOLS = {"weights", "kv_cache", "runtime"}
LONG = 100


@pytest.fixture
def engine() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.fixture
def linked() -> Iterator[Driver]:
    driver = Driver(connector=FakeConnector)
    yield driver
    driver.close()


def loading(driver: Driver, request_id: str) -> None:
    """A request that waits for KV from a peer."""
    driver.add(request_id, load=8)
    driver.step()
    assert driver.core.stats().scheduler.loading == 1


# ---- levels and policies (E2) -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_e2_a_level_unmaps_every_pool_and_the_wake_gives_the_same_answers(engine: Driver, level: int, mode: str) -> None:
    before = engine.answer("a")
    report = engine.slept(level=level, mode=mode)
    assert (report["state"], report["level"], report["noop"]) == ("asleep", level, False)
    assert engine.mapped() == set()
    assert report["unmapped_bytes"] == report["returned_bytes"] > 0
    woken = engine.woken()
    assert (woken["state"], woken["missing_tags"]) == ("awake", [])
    assert woken["refilled_tags"] == (["weights"] if level == 2 else [])
    assert engine.worker.reloads == (1 if level == 2 else 0)
    assert engine.answer("b") == before


def test_e2_level_0_is_a_pause_and_unmaps_nothing(engine: Driver) -> None:
    report = engine.slept(level=0)
    assert engine.state is EngineState.PAUSED
    assert (report["unmapped_bytes"], engine.mapped()) == (0, POOLS)


def test_e2_policies_are_the_general_form(engine: Driver) -> None:
    report = engine.slept(policies={"weights": "host", "kv_cache": "keep"})
    assert report["level"] is None
    assert engine.mapped() == {"kv_cache", "runtime"}
    assert engine.state is EngineState.ASLEEP
    engine.woken()
    assert engine.answer("a") == reference(8)


def test_e2_runtime_may_be_discarded_because_it_is_made_again(engine: Driver) -> None:
    engine.slept(policies={"runtime": "discard"})
    assert engine.woken()["refilled_tags"] == ["runtime"]
    assert engine.answer("a") == reference(8)


def test_m8_a_deeper_sleep_needs_no_wake(engine: Driver) -> None:
    engine.slept(level=1)
    assert engine.core.stats().memory.tag("weights").image_bytes > 0
    report = engine.slept(level=2)
    assert (report["state"], engine.worker.reloads) == ("asleep", 0)
    assert engine.core.stats().memory.tag("weights").image_bytes == 0
    engine.woken()
    assert engine.answer("a") == reference(8)


@pytest.mark.parametrize(
    ("fields", "error", "names"),
    [
        ({"level": 3}, ConfigurationError, "level is 3; use one of 0, 1, 2"),
        ({"mode": "now"}, ConfigurationError, "mode is 'now'; use one of abort, wait, keep"),
        ({"policies": {"gold": "host"}}, UnknownTagError, "kv_cache, runtime, weights"),
        ({"policies": {"weights": "burn"}}, ConfigurationError, "use one of keep, host, discard"),
        ({"deadline_s": -1.0}, ConfigurationError, "deadline_s"),
        ({"deadline_s": float("nan")}, ConfigurationError, "deadline_s"),
    ],
)
def test_a_bad_sleep_is_refused_by_name_and_changes_nothing(engine: Driver, fields: dict, error: type, names: str) -> None:
    with pytest.raises(error, match=names):
        engine.sleep(**fields).result(0)
    assert engine.state is EngineState.AWAKE
    assert engine.answer("a") == reference(8)


def test_a_wake_of_an_unknown_tag_names_the_known_ones(engine: Driver) -> None:
    with pytest.raises(UnknownTagError, match="kv_cache, runtime, weights"):
        engine.core.wake_up(["gold"]).result(0)


def test_without_pools_only_a_pause_is_possible() -> None:
    engine = Driver(sleep=SleepConfig())
    with pytest.raises(ConfigurationError, match="enable_sleep_mode"):
        engine.sleep(level=1).result(0)
    with pytest.raises(ConfigurationError, match="enable_sleep_mode"):
        engine.core.release_kv_cache_memory().result(0)
    assert engine.slept(level=0)["state"] == "paused"
    engine.close()


# ---- modes (E2, E3) -----------------------------------------------------------------------------------------


def test_wait_lets_running_requests_finish_and_keeps_waiting_ones_queued(engine: Driver) -> None:
    engine.add("running", 8)
    engine.step(2)
    ticket = engine.sleep(level=1, mode="wait")
    with pytest.raises(AsleepError, match="draining"):
        engine.add("late")
    engine.settle()
    assert ticket.result(0)["state"] == "asleep"
    assert engine.tokens["running"] == reference(8)


def test_wait_does_not_begin_what_was_only_queued(engine: Driver) -> None:
    engine.core.pause()
    engine.settle()
    engine.add("queued", 8)  # a pause queues
    engine.slept(level=1, mode="wait")
    assert "queued" not in engine.tokens
    engine.woken()
    engine.settle()
    assert engine.tokens["queued"] == reference(8)


def test_abort_ends_everything_at_once(engine: Driver) -> None:
    engine.add("running", LONG)
    engine.step(3)
    engine.core.pause()
    engine.settle()
    engine.add("queued")
    ticket = engine.sleep(level=1, mode="abort")
    engine.settle()
    assert ticket.result(0)["state"] == "asleep"
    assert {e.finish_reason for e in engine.ends.values()} == {FinishReason.ABORT}
    assert set(engine.ends) == {"running", "queued"}


@pytest.mark.parametrize("how", ["the same sleep", "a deeper sleep", "a pause", "queued behind a transaction"])
def test_abort_of_an_engine_that_is_asleep_ends_what_is_frozen(engine: Driver, how: str) -> None:
    engine.add("running", LONG)
    engine.step(3)
    ticket = engine.sleep(level=1, mode="keep")
    if how == "queued behind a transaction":
        engine.step()
        assert engine.state is EngineState.SLEEPING
    else:
        engine.settle()
    asked = engine.core.pause("abort") if how == "a pause" else engine.sleep(level=1 + (how == "a deeper sleep"), mode="abort")
    engine.settle()
    assert ticket.result(0)["state"] == asked.result(0)["state"] == "asleep"
    assert engine.ends["running"].finish_reason is FinishReason.ABORT
    assert how != "a pause" or asked.result(0)["noop"] is False
    engine.woken()
    assert engine.answer("a") == reference(8)


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_what_is_frozen_waits_for_the_wake_whatever_other_sleeps_come(engine: Driver, mode: str) -> None:
    engine.add("a", 20)
    engine.step(4)
    engine.slept(level=1, mode="keep")
    engine.slept(level=2, mode=mode)
    assert not engine.ends
    engine.woken()
    engine.settle()
    assert engine.tokens["a"] == reference(20)


@pytest.mark.parametrize("while_asleep", ["wait", "wake"])
def test_abort_of_an_engine_that_is_asleep_ends_what_waits_for_it(while_asleep: str) -> None:
    engine = Driver(sleep=SleepConfig(enable_sleep_mode=True, while_asleep=while_asleep))  # type: ignore[arg-type]
    engine.slept(level=1)
    engine.add("a")
    engine.slept(level=2, mode="abort")
    assert engine.ends["a"].finish_reason is FinishReason.ABORT
    assert engine.state is EngineState.ASLEEP
    engine.close()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_keep_freezes_and_the_text_goes_on_as_if_nothing_had_happened(engine: Driver, level: int) -> None:
    engine.add("a", 20)
    engine.add("b", 20, [7, 7, 7])
    engine.step(6)
    assert 0 < len(engine.tokens["a"]) < 20
    report = engine.slept(level=level, mode="keep")
    assert report["state"] == ("paused" if level == 0 else "asleep")
    assert not engine.ends
    engine.woken()
    engine.settle()
    assert engine.tokens == {"a": reference(20), "b": reference(20, [7, 7, 7])}


@pytest.mark.parametrize("policy", ["keep", "host"])
def test_kept_kv_content_keeps_the_prefix_cache(engine: Driver, policy: str) -> None:
    before = engine.answer("a")
    engine.slept(policies={"weights": "host", "kv_cache": policy})
    engine.woken()
    assert engine.answer("b") == before
    assert engine.ends["b"].num_cached_tokens == 8


def test_loads_are_cancelled_by_keep_and_recomputed(linked: Driver) -> None:
    loading(linked, "a")
    ticket = linked.sleep(level=1, mode="keep")
    linked.settle()
    assert linked.connector_scheduler.cancelled == ["a"]
    assert ticket.result(0)["state"] == "asleep"
    linked.woken()
    linked.settle()
    assert linked.tokens["a"] == reference(8)


def test_loads_are_cancelled_by_abort(linked: Driver) -> None:
    loading(linked, "a")
    linked.slept(level=1, mode="abort")
    assert linked.ends["a"].finish_reason is FinishReason.ABORT
    assert linked.core.stats().scheduler.cancelling == 0


# ---- deadlines and cancels (E2, E8) -------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_deadline_aborts_the_sleep_by_name_and_everything_goes_on(engine: Driver, level: int) -> None:
    engine.add("slow", LONG)
    engine.step(2)
    ticket = engine.sleep(level=level, mode="wait", deadline_s=5)
    engine.step(3)
    assert (engine.state, ticket.done()) == (EngineState.DRAINING, False)
    engine.clock.advance(5)
    engine.step()
    with pytest.raises(SleepAborted, match="slow") as caught:
        ticket.result(0)
    assert (caught.value.fields["reason"], caught.value.fields["waiting_for"]) == ("deadline", "slow")
    assert (engine.state, engine.mapped()) == (EngineState.AWAKE, POOLS)
    engine.add("next", 4)
    engine.settle()
    assert engine.tokens["slow"] == reference(LONG)
    assert engine.tokens["next"] == reference(4), "admission is open again"


def test_the_default_deadline_is_the_configured_one() -> None:
    engine = Driver(sleep=SleepConfig(enable_sleep_mode=True, default_deadline_s=7))
    engine.add("slow", LONG)
    engine.step()
    ticket = engine.sleep(level=1)
    engine.clock.advance(6.9)
    engine.step()
    assert not ticket.done()
    engine.clock.advance(0.1)
    engine.step()
    assert isinstance(ticket.exception(0), SleepAborted)
    engine.close()


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_load_that_nobody_ends_is_met_by_the_deadline(linked: Driver, mode: str) -> None:
    loading(linked, "a")
    linked.connector.ignores_cancels = True
    ticket = linked.sleep(level=1, mode=mode, deadline_s=3)
    linked.step(3)
    assert not ticket.done()
    linked.clock.advance(3)
    linked.step()
    with pytest.raises(SleepAborted, match="a" if mode == "keep" else "being cancelled"):
        ticket.result(0)
    assert (linked.state, linked.connector.calls) == (EngineState.AWAKE, ["register"])


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_e8_a_wake_during_a_drain_cancels_the_sleep(linked: Driver, mode: str) -> None:
    linked.add("running", LONG)
    loading(linked, "loading")
    linked.connector.ignores_cancels = True
    slept = linked.sleep(level=1, mode=mode)
    linked.step(2)
    woken = linked.core.wake_up().result(0)
    assert (woken["state"], woken["noop"], woken["reason"]) == ("awake", False, "cancelled the sleep that was draining")
    with pytest.raises(SleepAborted) as caught:
        slept.result(0)
    assert caught.value.fields["reason"] == "woken"
    linked.connector.next_finished = type(linked.connector.next_finished)(failed=frozenset({"loading"}))
    linked.settle()
    assert linked.tokens["running"] == reference(LONG)
    assert linked.tokens["loading"] == reference(8)


def test_e8_a_sleep_during_a_wake_waits_for_it(engine: Driver) -> None:
    engine.slept(level=1)
    woken = engine.core.wake_up()
    assert engine.state is EngineState.WAKING
    slept = engine.sleep(level=2)
    assert not slept.done()
    engine.settle()
    assert woken.result(0)["state"] == "awake"
    assert slept.result(0)["state"] == "asleep"
    assert engine.state is EngineState.ASLEEP


def test_e8_a_wake_during_the_unmap_runs_after_it(engine: Driver) -> None:
    slept = engine.sleep(level=1)
    engine.step()
    assert engine.state is EngineState.SLEEPING
    woken = engine.core.wake_up()
    engine.settle()
    assert (slept.result(0)["state"], woken.result(0)["state"]) == ("asleep", "awake")
    assert engine.answer("a") == reference(8)


def test_the_same_sleep_twice_shares_one_result_and_another_is_refused(engine: Driver) -> None:
    engine.add("running", 8)
    engine.step()
    first, second = engine.sleep(level=1), engine.sleep(level=1)
    with pytest.raises(StateError, match=r"draining for another sleep.*wake_up"):
        engine.sleep(level=2).result(0)
    with pytest.raises(StateError, match="wake_up"):
        engine.core.resume().result(0)
    engine.settle()
    assert first.result(0) is second.result(0)


def test_calls_queue_up_in_order_behind_a_transaction(engine: Driver) -> None:
    engine.sleep(level=1)
    engine.step()
    tickets = [engine.core.wake_up(["weights"]), engine.core.wake_up(), engine.sleep(level=2), engine.core.wake_up()]
    engine.settle()
    assert [t.result(0)["state"] for t in tickets] == ["asleep", "awake", "asleep", "awake"]
    assert engine.answer("a") == reference(8)


def test_e8_a_wake_also_cancels_sleeps_that_wait_behind_the_drain(engine: Driver) -> None:
    engine.add("a", LONG)
    engine.step(2)
    engine.slept(level=1, mode="keep")
    engine.core.wake_up()
    first, second = engine.sleep(level=1, mode="wait"), engine.sleep(level=2, mode="wait")
    engine.background.run()
    engine.step()
    assert engine.state is EngineState.DRAINING
    assert engine.core.wake_up().result(0)["state"] == "awake"
    assert isinstance(first.exception(0), SleepAborted)
    assert isinstance(second.exception(0), SleepAborted)
    engine.settle()
    assert (engine.state, engine.tokens["a"]) == (EngineState.AWAKE, reference(LONG))


# ---- pause and resume ---------------------------------------------------------------------------------------


def test_a_pause_queues_and_resume_goes_on(engine: Driver) -> None:
    engine.add("a", 20)
    engine.step(4)
    engine.core.pause()
    engine.settle()
    engine.add("b", 8)
    engine.step(5)
    assert "b" not in engine.tokens
    assert engine.core.resume().result(0)["state"] == "awake"
    engine.settle()
    assert engine.tokens == {"a": reference(20), "b": reference(8)}


def test_resume_cancels_a_pause_that_drains(engine: Driver) -> None:
    engine.add("a", LONG)
    engine.step()
    paused = engine.core.pause("wait")
    assert engine.core.resume().result(0)["state"] == "awake"
    assert isinstance(paused.exception(0), SleepAborted)


def test_resume_of_a_sleeping_engine_names_the_call_that_helps(engine: Driver) -> None:
    engine.slept(level=1)
    with pytest.raises(StateError, match=r"asleep: call wake_up\(\)"):
        engine.core.resume().result(0)


def test_an_aborted_sleep_leaves_a_paused_engine_paused(engine: Driver) -> None:
    engine.core.pause()
    engine.settle()
    engine.worker.memory.register_tag_hooks("weights", before_unmap=lambda: 1 / 0, name="stubborn")
    with pytest.raises(SleepAborted):
        engine.slept(level=1)
    assert engine.state is EngineState.PAUSED


def test_release_kv_cache_memory_keeps_the_weights(engine: Driver) -> None:
    engine.answer("a")
    ticket = engine.core.release_kv_cache_memory()
    engine.settle()
    assert ticket.result(0)["operation"] == "release_kv_cache"
    assert (engine.mapped(), engine.state) == ({"weights", "runtime"}, EngineState.ASLEEP)
    assert engine.woken(["kv_cache"])["state"] == "awake"
    assert engine.answer("b") == reference(8)


# ---- the table ----------------------------------------------------------------------------------------------


def test_every_state_can_die_and_nothing_leaves_death() -> None:
    assert set(MOVES) == set(EngineState)
    assert all(EngineState.DEAD in to for state, to in MOVES.items() if state is not EngineState.DEAD)
    assert MOVES[EngineState.DEAD] == frozenset()


def test_only_moves_of_the_table_happen(engine: Driver) -> None:
    engine.add("a", LONG)
    engine.step()
    engine.sleep(level=1)
    engine.step()
    engine.core.wake_up()
    engine.slept(level=1, mode="keep")
    engine.slept(level=2)
    engine.woken(["weights"])
    engine.woken()
    states = engine.states
    assert all(after in MOVES[before] for before, after in pairwise(states))
    assert {EngineState.DRAINING, EngineState.SLEEPING, EngineState.ASLEEP, EngineState.WAKING} <= set(states)


def test_shutdown_fails_every_open_call_and_request() -> None:
    engine = Driver()
    engine.add("a", LONG)
    engine.step()
    ticket = engine.core.sleep(SleepRequest(level=1))
    engine.background.inline = True
    outputs = engine.core.shutdown()
    assert ticket.exception(0) is not None
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", FinishReason.ABORT)]
    assert engine.worker.closed
    assert engine.core.shutdown() == []
