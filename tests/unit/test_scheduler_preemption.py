"""Preemption by recompute, and abort in every state without a connector."""

from __future__ import annotations

import pytest
from scheduler_fakes import Engine, generate

from torpor.errors import BugError, DeviceError
from torpor.request import FinishReason
from torpor.scheduler import RequestState, RunnerOutput
from torpor.scheduler.sequence import MOVES


def crowded(caching: bool = True) -> Engine:
    """Three requests that fit together at first, and not later on: 8 blocks of 4 tokens, each needs 7 at its end."""
    engine = Engine(num_blocks=8, caching=caching)
    for index, name in enumerate("abc"):
        engine.add(name, [10 * index + j for j in range(5)], max_tokens=20)
    return engine


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_give_the_same_text(caching):
    engine = crowded(caching)
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    assert engine.text == {name: generate([10 * i + j for j in range(5)], 20) for i, name in enumerate("abc")}
    assert engine.manager.stats().allocated_blocks == 0


def test_the_youngest_gives_way_and_the_oldest_never_does():
    engine = crowded()
    preempted = []
    for _ in range(200):
        before = {name: engine.scheduler.state_of(name) for name in "abc"}
        engine.step()
        preempted += [
            name
            for name in "abc"
            if before[name] is RequestState.RUNNING and engine.scheduler.state_of(name) is RequestState.PREEMPTED
        ]
        if len(engine.last) == 3:
            break
    assert preempted[0] == "c"
    assert "a" not in preempted
    assert list(engine.last) == ["a", "b", "c"]


def test_a_preempted_request_goes_on_before_any_waiting_one():
    engine = crowded()
    engine.add("late", [99], max_tokens=1)
    while engine.scheduler.state_of("c") is not RequestState.PREEMPTED:
        engine.step()
        assert engine.scheduler.state_of("late") is RequestState.FINISHED or engine.scheduler.num_waiting == 1
    engine = crowded()
    while engine.scheduler.state_of("c") is not RequestState.PREEMPTED:
        engine.step()
    engine.add("late", [99], max_tokens=1)
    while engine.scheduler.state_of("c") is RequestState.PREEMPTED:
        assert engine.scheduler.waiting_ids() == ["late"]
        engine.step()
    engine.run()
    assert engine.text["late"] == generate([99], 1)


def test_nobody_begins_in_a_step_that_preempts():
    engine = crowded()
    engine.add("late", [99], max_tokens=1)
    for _ in range(100):
        before = engine.scheduler.stats().preemptions
        waiting = engine.scheduler.num_waiting
        engine.step()
        if engine.scheduler.stats().preemptions > before:
            assert engine.scheduler.num_waiting == waiting


def test_one_that_fits_alone_always_gets_on():
    engine = Engine(num_blocks=4, max_num_batched_tokens=3)
    for name in "abcdef":
        engine.add(name, [ord(name), 2, 3], max_tokens=100)  # each fills the whole cache
    engine.run()
    assert engine.text == {name: generate([ord(name), 2, 3], 13) for name in "abcdef"}


def test_a_preempted_request_says_how_much_was_cached_when_it_first_began():
    engine = crowded()
    engine.run()
    assert engine.last["c"].num_cached_tokens == 0


# Abort


def test_abort_of_a_waiting_one():
    engine = Engine(max_num_seqs=1)
    engine.add("a", [1])
    engine.add("b", [2])
    engine.step()
    (out,) = engine.scheduler.abort(["b"])
    assert (out.request_id, out.finish_reason, out.num_prompt_tokens) == ("b", FinishReason.ABORT, 1)
    engine.scheduler.check_integrity()
    engine.run()
    assert list(engine.text) == ["a"]


@pytest.mark.parametrize("steps", [1, 3])
def test_abort_of_a_running_one_frees_its_blocks(steps):
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", list(range(20)), max_tokens=50)
    for _ in range(steps):
        engine.step()
    engine.take(engine.scheduler.abort(["a"]))
    engine.scheduler.check_integrity()
    assert engine.manager.stats().allocated_blocks == 0
    assert engine.step() is None


def test_abort_of_a_preempted_one():
    engine = crowded()
    while engine.scheduler.state_of("c") is not RequestState.PREEMPTED:
        engine.step()
    engine.take(engine.scheduler.abort(["c"]))
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.text["b"] == generate([10 + j for j in range(5)], 20)


def test_abort_between_a_step_and_its_result():
    engine = Engine()
    engine.add("a", [1])
    engine.add("b", [2])
    output = engine.scheduler.schedule()
    result = engine.execute(output)
    engine.take(engine.scheduler.abort(["a"]))
    engine.add("a", [3])  # the id again, and the old result is not for it
    engine.take([out for out in engine.scheduler.update(output, result) if out.request_id != "a"])
    engine.scheduler.check_integrity()
    engine.last.pop("a")
    engine.run()
    assert engine.text == {"a": generate([3], 4), "b": generate([2], 4)}


def test_abort_of_one_that_is_unknown_or_answered_says_nothing():
    engine = Engine()
    engine.add("a", [1], max_tokens=1)
    engine.run()
    assert engine.scheduler.abort(["a", "never"]) == []
    engine.add("b", [1])
    assert len(engine.scheduler.abort(["b", "b"])) == 1


def test_abort_with_an_error_says_which():
    engine = Engine()
    engine.add("a", [1])
    (out,) = engine.scheduler.abort(["a"], error=DeviceError("it broke", code=5))
    assert out.finish_reason is FinishReason.ERROR
    assert out.error == {"type": "DeviceError", "message": "it broke", "fields": {"code": 5}}


def test_abort_takes_its_own_list_of_ids():
    engine = Engine()
    for name in "abc":
        engine.add(name, [1])
    engine.step()
    assert len(engine.scheduler.abort(engine.scheduler.running_ids())) == 3
    engine.scheduler.check_integrity()


# The table of moves


def test_every_state_has_its_moves_and_every_state_but_the_first_is_reached():
    assert set(MOVES) == set(RequestState)
    assert set().union(*MOVES.values()) == set(RequestState)


def test_a_move_that_is_not_in_the_table_is_a_bug():
    engine = Engine()
    engine.add("a", [1])
    seq = engine.scheduler._queues.by_id["a"]
    with pytest.raises(BugError, match="'a' cannot go from waiting to handed_off"):
        engine.scheduler._queues.move(seq, RequestState.HANDED_OFF)


def test_integrity_finds_a_request_in_the_wrong_queue():
    engine = Engine()
    engine.add("a", [1])
    engine.scheduler._queues.by_id["a"].state = RequestState.RUNNING
    with pytest.raises(BugError, match="'a' is running and in the queue of those waiting"):
        engine.scheduler.check_integrity()


def test_integrity_finds_blocks_that_nobody_owns():
    engine = Engine()
    engine.manager.allocate("ghost", 4)
    with pytest.raises(BugError, match="disagree on \\['ghost'\\]"):
        engine.scheduler.check_integrity()


def test_an_update_without_its_sequences_changes_nothing():
    engine = Engine()
    engine.add("a", [1])
    output = engine.scheduler.schedule()
    result = engine.execute(output)
    engine.take(engine.scheduler.update(output, result))
    assert engine.scheduler.update(output, RunnerOutput()) == []  # once is enough
    engine.run()
    assert engine.text["a"] == generate([1], 4)
