"""What sleep and wake ask of the scheduler: admission, freezing, draining loads and hand-offs. E6: no old KV is hit after a
reset."""

from __future__ import annotations

import pytest
from scheduler_fakes import Engine, generate, next_token

from torpor.errors import StateError
from torpor.request import FinishReason
from torpor.scheduler import RequestState

PROMPT = list(range(14))


def sleep_and_wake(engine: Engine, weights: str | None = None) -> None:
    """What is between a freeze and the next step of an engine that slept: the content of the KV cache is gone."""
    engine.scheduler.end_hand_offs()
    engine.manager.reset(weights)
    engine.kv.weights = weights or engine.kv.weights
    engine.kv.clear()
    engine.scheduler.check_integrity()


def test_while_admission_is_closed_nothing_begins_and_what_has_begun_ends():
    engine = Engine(max_num_seqs=2)
    engine.add("a", [1, 2])
    engine.step()
    engine.scheduler.close_admission()
    engine.scheduler.close_admission()
    engine.add("b", [3])
    engine.run_until_answered("a")
    assert engine.step() is None
    assert engine.scheduler.waiting_ids() == ["b"]
    assert not engine.scheduler.admission_open
    engine.scheduler.open_admission()
    engine.run()
    assert engine.text["b"] == generate([3], 4)


def test_a_preempted_request_goes_on_while_admission_is_closed():
    engine = Engine(num_blocks=8)
    for index, name in enumerate("abc"):
        engine.add(name, [10 * index + j for j in range(5)], max_tokens=20)
    engine.step()
    engine.scheduler.close_admission()
    while engine.scheduler.has_running:
        engine.step()
    assert engine.scheduler.stats().preemptions > 0
    assert set(engine.last) == {"a", "b", "c"}


@pytest.mark.parametrize("steps", range(1, 12))
def test_frozen_requests_go_on_after_the_wake_with_the_same_text(steps):
    engine = Engine(num_blocks=10, max_num_batched_tokens=6)
    prompts = {name: [ord(name) + j for j in range(7)] for name in "abc"}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
    for _ in range(steps):
        engine.step()
    order = [*engine.scheduler.running_ids(), *engine.scheduler.waiting_ids()]
    engine.scheduler.close_admission()
    engine.scheduler.freeze()
    engine.scheduler.check_integrity()
    assert not engine.scheduler.has_running
    assert engine.scheduler.waiting_ids() == order
    assert engine.manager.stats().allocated_blocks == 0
    sleep_and_wake(engine)
    assert engine.step() is None
    engine.scheduler.open_admission()
    engine.run()
    assert engine.text == {name: generate(prompt, 12) for name, prompt in prompts.items()}


def test_frozen_requests_come_before_those_that_never_began_and_keep_their_seed():
    engine = Engine(max_num_seqs=2)
    for name in "abcd":
        engine.add(name, [ord(name)], max_tokens=9)
    engine.step()
    before = {seq.request_id: seq.sampling.seed for seq in engine.steps[-1].sequences}
    engine.scheduler.freeze()
    assert engine.scheduler.waiting_ids() == ["a", "b", "c", "d"]
    engine.step()
    assert {seq.request_id: seq.sampling.seed for seq in engine.steps[-1].sequences} == before
    assert engine.scheduler.stats().frozen == 2


def test_freezing_nothing_does_nothing():
    engine = Engine()
    engine.scheduler.freeze()
    engine.scheduler.freeze()
    assert engine.scheduler.stats().frozen == 0


def test_the_result_of_a_step_from_before_a_freeze_is_passed_over():
    engine = Engine()
    engine.add("a", PROMPT)
    output = engine.scheduler.schedule()
    result = engine.execute(output)
    engine.scheduler.freeze()
    sleep_and_wake(engine)
    assert engine.scheduler.update(output, result) == []
    assert engine.manager.stats().cached_blocks == 0  # E6: it enters nothing in the new index
    engine.run()
    assert engine.text["a"] == generate(PROMPT, 4)


def test_e6_after_a_reset_nothing_computed_before_is_hit():
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    sleep_and_wake(engine)
    engine.add("b", PROMPT)
    engine.run()
    assert engine.last["b"].num_cached_tokens == 0
    assert engine.text["b"] == generate(PROMPT, 4)


def test_e6_after_new_weights_a_frozen_request_goes_on_with_them():
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=8)
    engine.step()
    engine.step()
    said = list(engine.text["a"])
    assert said == generate(PROMPT, 2, "w")
    engine.scheduler.freeze()
    sleep_and_wake(engine, "other weights")
    engine.run()
    assert engine.text["a"] == said + generate([*PROMPT, *said], 6, "other weights")
    assert engine.text["a"][2] == next_token("other weights", [*PROMPT, *said])


def test_a_reset_is_refused_while_anything_holds_blocks():
    engine = Engine(connector=True)
    engine.add("p", PROMPT, max_tokens=1, params={"do_remote_decode": True})
    engine.step()
    with pytest.raises(StateError, match="end hand-offs first"):
        engine.manager.reset()
    engine.scheduler.end_hand_offs()
    engine.manager.reset()


def test_loads_must_be_drained_before_a_freeze():
    engine = Engine(connector=True)
    engine.add("a", PROMPT, params={"remote_tokens": 14})
    engine.add("b", PROMPT[::-1], params={"remote_tokens": 14})
    engine.step()
    engine.scheduler.close_admission()
    with pytest.raises(StateError, match="cancel_loads first"):
        engine.scheduler.freeze()
    assert engine.scheduler.cancel_loads() == ["a", "b"]
    assert engine.scheduler.cancel_loads() == ["a", "b"]
    assert engine.connector.cancelled == ["a", "b"]
    engine.step()
    assert engine.scheduler.loading_ids() == ["a", "b"]
    engine.connector.fail("a")
    engine.connector.complete("b", engine.kv)
    while engine.scheduler.has_loading:
        output = engine.scheduler.empty_step()  # nobody else may go on meanwhile
        engine.take(engine.scheduler.update(output, engine.execute(output)))
    engine.scheduler.freeze()
    assert engine.scheduler.waiting_ids() == ["a", "b"]
    sleep_and_wake(engine)
    engine.scheduler.open_admission()
    engine.run()
    assert engine.text == {"a": generate(PROMPT, 4), "b": generate(PROMPT[::-1], 4)}


def test_loads_of_aborted_requests_are_waited_for_too():
    engine = Engine(connector=True)
    engine.add("a", PROMPT, params={"remote_tokens": 14})
    engine.step()
    engine.take(engine.scheduler.abort(["a"]))
    assert engine.scheduler.cancel_loads() == ["a"]
    assert engine.connector.cancelled == ["a"]
    assert engine.scheduler.has_loading
    assert engine.scheduler.loading_ids() == []
    engine.connector.fail("a")
    engine.step()
    assert not engine.scheduler.has_loading
    assert engine.last["a"].finish_reason is FinishReason.ABORT


def test_abort_everything_leaves_nothing():
    engine = Engine(connector=True, max_num_seqs=3)
    engine.add("run", [1, 2, 3], max_tokens=50)
    engine.add("load", PROMPT, params={"remote_tokens": 14})
    engine.add("hand", [7] * 9, max_tokens=1, params={"do_remote_decode": True})
    engine.add("wait", [4])
    engine.step()
    scheduler = engine.scheduler
    states = {name: scheduler.state_of(name) for name in ("run", "load", "hand")}
    assert states == {"run": RequestState.RUNNING, "load": RequestState.LOADING, "hand": RequestState.HANDED_OFF}
    engine.take(scheduler.abort([*scheduler.running_ids(), *scheduler.loading_ids(), *scheduler.waiting_ids()]))
    assert set(engine.last) == {"run", "load", "hand", "wait"}
    scheduler.end_hand_offs()
    engine.connector.fail("load")
    engine.step()
    engine.manager.reset()
    scheduler.check_integrity()
    assert engine.manager.stats().free_blocks == engine.manager.num_blocks
