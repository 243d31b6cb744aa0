"""Loads from peers and hand-offs to them. P5: lost KV is recomputed; a request may get slower, never wrong."""

from __future__ import annotations

import pytest
from scheduler_fakes import Engine, generate

from torpor.errors import RequestError
from torpor.request import FinishReason
from torpor.scheduler import RequestState
from torpor.testing.clock import FakeClock

PROMPT = list(range(14))


def consumer(**kw) -> Engine:
    return Engine(connector=True, **kw)


def remote(tokens: int, **kw) -> dict:
    return {"do_remote_prefill": True, "remote_tokens": tokens, **kw}


# Loads


@pytest.mark.parametrize("held", [14, 13, 12, 7, 1])
def test_a_load_is_not_computed_again_but_for_the_last_token(held):
    engine = consumer()
    engine.add("a", PROMPT, params=remote(held))
    engine.step()
    assert engine.scheduler.state_of("a") is RequestState.LOADING
    assert engine.steps[0].sequences == []
    assert engine.steps[0].connector_metadata.started == ["a"]
    engine.connector.complete("a", engine.kv)
    engine.step()
    assert engine.scheduler.state_of("a") is RequestState.RUNNING
    first = engine.step().sequences[0]
    assert first.start == min(held, 13)
    engine.run()
    assert engine.text["a"] == generate(PROMPT, 4)
    assert engine.last["a"].num_cached_tokens == min(held, 13)
    assert engine.scheduler.stats().loads_done == 1


def test_a_peer_that_claims_more_than_the_prompt_is_believed_for_the_prompt():
    engine = consumer()
    engine.add("a", PROMPT, params=remote(1000))
    engine.step()
    assert engine.connector.told["a"][0][1] == 14


def test_the_connector_gets_the_blocks_after_the_local_hit_and_only_those_with_external_tokens():
    engine = consumer()
    engine.add("a", PROMPT[:9], max_tokens=1)
    engine.run()
    engine.add("b", [*PROMPT, 91, 92, 93, 94, 95], params=remote(14))  # 19 tokens: 8 here, 6 there, 5 nowhere
    engine.step()
    ((blocks, count),) = engine.connector.told["b"]
    assert count == 6
    assert tuple(blocks) == engine.manager.table("b")[2:4]
    assert len(engine.manager.table("b")) == 5
    engine.connector.complete("b", engine.kv)
    engine.run()
    assert engine.last["b"].num_cached_tokens == 14
    assert engine.text["b"] == generate([*PROMPT, 91, 92, 93, 94, 95], 4)


def test_others_run_while_a_load_is_in_flight():
    engine = consumer()
    engine.add("a", PROMPT, params=remote(14))
    engine.add("b", [1, 2], max_tokens=3)
    for _ in range(3):
        engine.step()
    assert engine.text == {"b": generate([1, 2], 3)}
    assert engine.scheduler.state_of("a") is RequestState.LOADING


def test_loads_begin_also_when_the_budget_of_the_step_is_spent():
    engine = consumer(max_num_batched_tokens=4)
    engine.add("long", list(range(40)))
    engine.add("a", PROMPT, params=remote(14))
    engine.step()
    assert engine.scheduler.state_of("a") is RequestState.LOADING


def test_blocks_of_a_load_are_hit_only_after_it_was_confirmed():
    engine = consumer()
    engine.add("a", PROMPT, params=remote(14))
    engine.step()
    engine.add("b", PROMPT, max_tokens=1)
    engine.run_until_answered("b")
    assert engine.last["b"].num_cached_tokens == 0
    engine.connector.complete("a", engine.kv)
    engine.step()
    engine.add("c", [*PROMPT, 5], max_tokens=1)
    engine.run_until_answered("c")
    assert engine.last["c"].num_cached_tokens == 12


def test_a_load_that_ends_with_a_full_block_does_not_share_it_before_its_last_token_is_computed():
    engine = consumer()
    prompt = list(range(16))
    engine.add("a", prompt, params=remote(16))
    engine.step()
    engine.connector.complete("a", engine.kv)
    engine.step()
    last = engine.manager.table("a")[3]
    assert not engine.manager.is_cached(last)
    engine.step()
    assert engine.manager.is_cached(last)
    engine.run()


@pytest.mark.parametrize("local", [0, 8])
def test_p5_a_failed_load_is_recomputed_and_counted(local):
    engine = consumer()
    if local:
        engine.add("first", PROMPT[: local + 1], max_tokens=1)
        engine.run()
    engine.add("a", PROMPT, params=remote(14))
    engine.step()
    engine.connector.fail("a")
    engine.step()
    assert engine.step().sequences[0].start == local
    engine.run()
    assert engine.text["a"] == generate(PROMPT, 4)
    assert engine.last["a"].num_cached_tokens == local
    assert engine.scheduler.stats().loads_failed == 1
    assert len(engine.connector.told["a"]) == 1  # asked for once


def test_p5_recomputing_a_failed_load_does_not_hold_up_younger_decodes():
    engine = consumer(max_num_batched_tokens=4)
    engine.add("old", list(range(20)), params=remote(20))
    engine.add("young", [1, 2], max_tokens=20)
    engine.step()
    engine.connector.fail("old")
    engine.step()
    shares = [(seq.request_id, len(seq.token_ids)) for seq in engine.step().sequences]
    assert shares == [("young", 1), ("old", 3)]
    engine.run()
    assert engine.text["old"] == generate(list(range(20)), 4)


def test_p5_a_late_load_is_cancelled_and_its_blocks_are_left_alone_until_the_connector_says_so():
    clock = FakeClock()
    engine = consumer(clock=clock, remote_kv_timeout_s=10.0)
    engine.add("a", PROMPT, params=remote(14))
    engine.step()
    clock.advance(9.9)
    engine.step()
    assert engine.connector.cancelled == []
    clock.advance(0.2)
    for _ in range(3):
        engine.step()
    assert engine.connector.cancelled == ["a"]
    assert engine.scheduler.state_of("a") is RequestState.LOADING
    engine.connector.fail("a")
    engine.run()
    assert engine.text["a"] == generate(PROMPT, 4)
    stats = engine.scheduler.stats()
    assert (stats.loads_timed_out, stats.loads_failed, stats.loads_done) == (1, 1, 0)


def test_a_load_that_arrives_after_its_cancellation_is_used():
    clock = FakeClock()
    engine = consumer(clock=clock, remote_kv_timeout_s=1.0)
    engine.add("a", PROMPT, params=remote(14))
    engine.step()
    clock.advance(2)
    engine.step()
    engine.connector.complete("a", engine.kv)
    engine.run()
    assert engine.last["a"].num_cached_tokens == 13
    assert engine.text["a"] == generate(PROMPT, 4)


def test_a_request_named_in_both_sets_is_recomputed():
    engine = consumer()
    engine.add("a", PROMPT, params=remote(14))
    engine.step()
    engine.connector.fail("a")
    engine.connector.recving.add("a")
    engine.run()
    assert engine.last["a"].num_cached_tokens == 0
    assert engine.text["a"] == generate(PROMPT, 4)


@pytest.mark.parametrize("arrives", [True, False])
def test_abort_of_a_loading_one_answers_at_once_and_frees_when_the_connector_lets_go(arrives):
    engine = consumer(num_blocks=5)
    engine.add("a", PROMPT, params=remote(14))
    engine.step()
    engine.take(engine.scheduler.abort(["a"]))
    assert engine.last["a"].finish_reason is FinishReason.ABORT
    assert engine.scheduler.abort(["a"]) == []
    assert engine.connector.cancelled == ["a"]
    engine.add("b", list(range(50, 60)), max_tokens=1)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.has_loading
    assert engine.scheduler.state_of("b") is RequestState.WAITING  # the blocks are not to be had yet
    if arrives:
        engine.connector.complete("a", engine.kv)
    else:
        engine.connector.fail("a")
    engine.run()
    assert engine.text["b"] == generate(list(range(50, 60)), 1)
    assert engine.manager.stats().allocated_blocks == 0
    engine.last.pop("a")
    engine.add("c", PROMPT, max_tokens=1)
    engine.run()
    assert engine.last["c"].num_cached_tokens == 0  # what an aborted load brought was never confirmed for use


def test_a_waiting_request_that_is_aborted_lets_the_peer_know():
    engine = consumer(max_num_seqs=1)
    engine.add("a", [1])
    engine.step()
    engine.add("b", PROMPT, params=remote(14))
    engine.scheduler.abort(["b"])
    assert engine.connector.told["b"] == [([], 0)]


def test_a_prompt_that_is_here_already_lets_the_peer_know():
    engine = consumer()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    engine.add("b", PROMPT, params=remote(12))
    engine.run()
    assert engine.connector.told["b"] == [([], 0)]
    assert engine.text["b"] == generate(PROMPT, 4)


def test_a_preempted_request_does_not_ask_the_peer_again():
    engine = consumer(num_blocks=8)
    engine.add("a", list(range(50, 55)), max_tokens=25)
    engine.add("b", list(range(5)), max_tokens=25, params=remote(5))
    engine.step()
    engine.connector.complete("b", engine.kv)
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    assert len(engine.connector.told["b"]) == 1
    assert engine.text["b"] == generate(list(range(5)), 25)


def test_a_load_takes_a_seat():
    engine = consumer(max_num_seqs=1)
    engine.add("a", PROMPT, params=remote(14))
    engine.add("b", [1])
    engine.step()
    assert engine.scheduler.state_of("b") is RequestState.WAITING


def test_the_order_of_arrival_outlives_a_slow_load():
    engine = consumer(num_blocks=9)
    engine.add("old", list(range(5)), max_tokens=25, params=remote(5))
    engine.step()
    engine.add("young", list(range(50, 55)), max_tokens=25)
    engine.step()
    engine.connector.complete("old", engine.kv)
    while engine.scheduler.stats().preemptions == 0:
        engine.step()
    assert engine.scheduler.state_of("young") is RequestState.PREEMPTED
    engine.run()


def test_the_only_running_one_gives_way_to_loads_rather_than_hang():
    engine = consumer(num_blocks=6)
    engine.add("load", PROMPT, max_tokens=2, params=remote(14))  # 4 blocks
    engine.add("a", [1, 2], max_tokens=12)
    for _ in range(12):
        engine.step()
    assert engine.scheduler.state_of("a") is RequestState.PREEMPTED
    assert engine.scheduler.has_running
    engine.connector.complete("load", engine.kv)
    engine.run()
    assert engine.text == {"load": generate(PROMPT, 2), "a": generate([1, 2], 12)}


def test_malformed_params_are_refused_at_the_door():
    engine = consumer()
    with pytest.raises(RequestError, match="bad params"):
        engine.add("a", PROMPT, params={"bad": True})
    assert engine.scheduler.num_waiting == 0


def test_late_echoes_are_passed_over():
    engine = consumer()
    engine.add("a", PROMPT)
    engine.connector.failed = {"a", "ghost"}
    engine.connector.recving = {"ghost"}
    engine.connector.sending = {"a", "ghost"}
    engine.run()
    assert engine.text["a"] == generate(PROMPT, 4)


# Loads inside a step


def test_a_load_inside_the_step_is_used_in_it():
    engine = consumer()
    engine.add("a", PROMPT, params=remote(14, sync=True))
    assert engine.step().sequences[0].start == 13
    engine.run()
    assert engine.text["a"] == generate(PROMPT, 4)
    assert engine.last["a"].num_cached_tokens == 13
    assert engine.scheduler.stats().loads_done == 1


def test_p5_a_load_that_fails_inside_the_step_takes_its_token_with_it():
    engine = consumer()
    engine.connector.fail_sync.add("a")
    engine.add("a", PROMPT, params=remote(14, sync=True))
    engine.add("b", [1, 2])
    engine.step()
    assert "a" not in engine.text
    engine.run()
    assert engine.text == {"a": generate(PROMPT, 4), "b": generate([1, 2], 4)}
    assert engine.scheduler.stats().loads_failed == 1


def test_p5_a_load_inside_a_step_whose_result_never_came_is_recomputed():
    engine = consumer()
    engine.add("a", PROMPT, params=remote(14, sync=True))
    engine.scheduler.schedule()
    engine.connector.sync_loads.clear()
    assert engine.step().sequences[0].start == 0
    engine.run()
    assert engine.text["a"] == generate(PROMPT, 4)


# Hand-offs


def test_a_prefill_of_one_token_ends_with_length_and_params_and_its_blocks_wait_for_the_reader():
    engine = consumer()
    engine.add("p", PROMPT, max_tokens=1, params={"do_remote_decode": True})
    engine.step()
    out = engine.last["p"]
    assert out.finish_reason is FinishReason.LENGTH
    assert out.new_token_ids == generate(PROMPT, 1)
    assert out.kv_transfer_params == {"remote_block_ids": list(engine.manager.table("p")), "remote_num_tokens": 14}
    assert engine.scheduler.state_of("p") is RequestState.HANDED_OFF
    assert engine.scheduler.has_transfers
    assert not engine.scheduler.has_running
    for name in "xyz":
        engine.add(name, [ord(name)] * 20, max_tokens=20)
    engine.run()
    engine.connector.read("p", engine.kv)
    engine.step()
    assert not engine.scheduler.has_transfers
    assert engine.manager.stats().allocated_blocks == 0


def test_a_hand_off_covers_what_was_computed_and_no_more():
    engine = consumer()
    engine.add("p", PROMPT, max_tokens=3, params={"do_remote_decode": True})  # 16 computed, the 17th token has no KV
    engine.run()
    blocks, computed = engine.connector.finished["p"]
    assert computed == 16
    assert len(blocks) == 4


def test_abort_of_a_handed_off_one_leaves_it_to_the_connector():
    engine = consumer()
    engine.add("p", PROMPT, max_tokens=1, params={"do_remote_decode": True})
    engine.step()
    assert engine.scheduler.abort(["p"]) == []
    assert engine.scheduler.state_of("p") is RequestState.HANDED_OFF


def test_an_aborted_request_is_not_handed_off():
    engine = consumer()
    engine.add("p", PROMPT, max_tokens=5, params={"do_remote_decode": True})
    engine.step()
    engine.take(engine.scheduler.abort(["p"]))
    assert engine.last["p"].kv_transfer_params is None
    assert engine.connector.finished == {}
    assert engine.manager.stats().allocated_blocks == 0


def test_hand_offs_can_be_ended_all_at_once_and_a_later_report_is_passed_over():
    engine = consumer()
    for name in "pq":
        engine.add(name, [ord(name)] * 9, max_tokens=1, params={"do_remote_decode": True})
    engine.step()
    assert engine.scheduler.end_hand_offs() == ["p", "q"]
    assert engine.scheduler.end_hand_offs() == []
    engine.scheduler.check_integrity()
    assert engine.manager.stats().allocated_blocks == 0
    engine.connector.sending = {"p"}
    engine.add("r", [1], max_tokens=1)
    engine.run()


def test_one_that_needs_more_than_hand_offs_leave_waits_for_them():
    engine = consumer(num_blocks=5)
    engine.add("p", PROMPT, max_tokens=1, params={"do_remote_decode": True})
    engine.step()
    engine.add("b", list(range(50, 60)), max_tokens=1)
    assert engine.scheduler.schedule() is None
    engine.connector.read("p", engine.kv)
    engine.run()
    assert engine.text["b"] == generate(list(range(50, 60)), 1)
