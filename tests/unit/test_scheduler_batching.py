"""Continuous batching: order, budgets, chunks, prefix hits, ends. The text is the same whatever the batching was."""

from __future__ import annotations

import pytest
from scheduler_fakes import Engine, generate

from torpor.errors import BugError, CapacityError, ConfigurationError, RequestError
from torpor.request import FinishReason, TokenLogprobs
from torpor.scheduler import RunnerOutput, SchedulerConfig

PROMPTS = {f"r{i}": [(7 * i + j) % 50 for j in range(3 + 5 * i)] for i in range(6)}


def shares(output) -> list[tuple[str, int]]:
    return [(seq.request_id, len(seq.token_ids)) for seq in output.sequences]


@pytest.mark.parametrize("budget", [1, 3, 8, 500])
@pytest.mark.parametrize("seats", [1, 3, 64])
def test_the_text_does_not_depend_on_chunks_or_company(budget, seats):
    engine = Engine(max_num_batched_tokens=budget, max_num_seqs=seats)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=9)
    engine.run()
    assert engine.text == {name: generate(prompt, 9) for name, prompt in PROMPTS.items()}
    assert {out.finish_reason for out in engine.last.values()} == {FinishReason.LENGTH}
    assert engine.manager.stats().allocated_blocks == 0


def test_long_prompts_come_in_chunks_beside_decodes_and_decodes_come_first():
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", [1, 2, 3], max_tokens=20)
    engine.step()
    engine.add("b", list(range(18)), max_tokens=20)
    seen = [shares(engine.step()) for _ in range(4)]
    assert seen == [[("a", 1), ("b", 7)], [("a", 1), ("b", 7)], [("a", 1), ("b", 4)], [("a", 1), ("b", 1)]]


def test_a_request_does_not_begin_beside_others_when_it_would_leave_them_no_block_to_grow():
    engine = Engine(num_blocks=8, max_num_batched_tokens=100)
    engine.add("a", list(range(15)), max_tokens=3)
    engine.add("b", list(range(50, 66)), max_tokens=3)  # four blocks, as many as are free
    assert shares(engine.step()) == [("a", 15)]
    engine.run()
    assert engine.scheduler.stats().preemptions == 0
    engine.add("alone", list(range(31)), max_tokens=1)  # the whole cache
    engine.run()
    assert engine.text["alone"] == generate(list(range(31)), 1)


def test_requests_begin_in_the_order_of_their_arrival_and_none_overtakes():
    engine = Engine(num_blocks=8, max_num_batched_tokens=100)  # 32 tokens
    engine.add("a", list(range(16)), max_tokens=2)
    engine.add("big", list(range(100, 124)), max_tokens=2)
    engine.add("small", [5], max_tokens=2)
    assert shares(engine.step()) == [("a", 16)]
    assert engine.scheduler.waiting_ids() == ["big", "small"]
    engine.step()
    assert shares(engine.step())[0] == ("big", 24)


def test_seats_limit_the_sequences_of_a_step():
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, [1, 2], max_tokens=2)
    assert shares(engine.step()) == [("a", 2), ("b", 2)]
    engine.run()
    assert len(engine.last) == 3


def test_a_second_request_computes_only_what_the_first_did_not():
    engine = Engine()
    prompt = list(range(30))
    engine.add("a", prompt)
    engine.run()
    engine.add("b", [*prompt[:21], 99])
    engine.run()
    assert shares(engine.steps[-4])[0] == ("b", 2)
    assert engine.last["b"].num_cached_tokens == 20
    assert engine.last["a"].num_cached_tokens == 0
    assert engine.last["b"].num_prompt_tokens == 22
    assert engine.text["b"] == generate([*prompt[:21], 99], 4)


def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_block_on():
    engine = Engine()
    for name in ("a", "b"):
        engine.add(name, list(range(16)))
        engine.run()
    assert engine.last["b"].num_cached_tokens == 12
    assert engine.text["a"] == engine.text["b"] == generate(list(range(16)), 4)


def test_generated_tokens_are_hit_too():
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=10)
    engine.run()
    engine.add("b", [1, 2, 3, *engine.text["a"]])
    engine.run()
    assert engine.last["b"].num_cached_tokens == 12


@pytest.mark.parametrize("caching", [True, False])
def test_what_is_computed_in_a_step_is_not_hit_in_the_same_step(caching):
    engine = Engine(caching=caching)
    prompt = list(range(12))
    engine.add("a", [*prompt, 1])
    engine.add("b", [*prompt, 2])
    assert shares(engine.step()) == [("a", 13), ("b", 13)]
    engine.run()
    assert engine.text == {"a": generate([*prompt, 1], 4), "b": generate([*prompt, 2], 4)}


# Ends


def test_end_of_sequence_ends_it_and_is_no_stop_reason():
    expected = generate([1, 2, 3], 5)
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=50, eos=(expected[4],))
    engine.run()
    assert engine.text["a"] == expected
    assert (engine.last["a"].finish_reason, engine.last["a"].stop_reason) == (FinishReason.STOP, None)


def test_ignore_eos_goes_on():
    expected = generate([1, 2, 3], 9)
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=9, eos=(expected[4],), ignore_eos=True)
    engine.run()
    assert engine.text["a"] == expected


def test_a_stop_token_of_the_client_is_the_stop_reason():
    expected = generate([1, 2, 3], 4)
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=50, stop_token_ids=(expected[3],), ignore_eos=True)
    engine.run()
    assert engine.text["a"] == expected
    assert (engine.last["a"].finish_reason, engine.last["a"].stop_reason) == (FinishReason.STOP, expected[3])


def test_min_tokens_forbids_stop_tokens_until_they_are_reached():
    expected = generate([1, 2, 3], 8)
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=8, min_tokens=3, eos=(expected[1],), stop_token_ids=(5000, expected[1]))
    engine.run()
    forbidden = [out.sequences[0].forbidden_token_ids for out in engine.steps]
    assert forbidden == [(expected[1], 5000)] * 3 + [()] * 5
    assert engine.text["a"] == expected  # this runner samples it all the same; that does not end it


def test_ignored_eos_is_not_forbidden():
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=2, min_tokens=2, eos=(7,), ignore_eos=True)
    engine.step()
    assert engine.steps[0].sequences[0].forbidden_token_ids == ()


@pytest.mark.parametrize(("max_model_len", "num_blocks", "full"), [(10, 64, 10), (100, 2, 8)])
def test_a_full_context_or_a_full_cache_ends_it(max_model_len, num_blocks, full):
    engine = Engine(max_model_len=max_model_len, num_blocks=num_blocks)
    assert engine.scheduler.context_len == full
    engine.add("a", [1, 2, 3], max_tokens=50)
    engine.run()
    assert engine.text["a"] == generate([1, 2, 3], full - 3)
    assert engine.last["a"].finish_reason is FinishReason.LENGTH


def test_logprobs_go_out_with_their_token():
    engine = Engine()
    engine.add("a", [1, 2, 3])
    output = engine.scheduler.schedule()
    logprobs = TokenLogprobs(token_id=9, logprob=-0.5, rank=1)
    (out,) = engine.scheduler.update(output, RunnerOutput(sampled={"a": 9}, logprobs={"a": logprobs}))
    assert out.logprobs == [logprobs]


def test_a_seed_is_chosen_once_where_none_was_given():
    engine = Engine()
    engine.add("a", [1, 2, 3])
    engine.add("b", [1, 2, 3])
    engine.add("c", [1, 2, 3], seed=7)
    engine.run()
    seeds = {
        name: {seq.sampling.seed for out in engine.steps for seq in out.sequences if seq.request_id == name} for name in "abc"
    }
    assert all(len(chosen) == 1 and None not in chosen for chosen in seeds.values())
    assert seeds["a"] != seeds["b"]
    assert seeds["c"] == {7}


# What goes wrong


def test_a_request_whose_logits_are_bad_ends_with_an_error_and_its_kv_is_not_hit():
    engine = Engine()
    engine.add("a", list(range(13)))
    engine.step()
    engine.add("b", list(range(100, 113)))
    output = engine.scheduler.schedule()
    result = RunnerOutput(sampled={"b": 1}, failed={"a": "logits are not finite"})
    outs = {out.request_id: out for out in engine.scheduler.update(output, result)}
    assert outs["a"].finish_reason is FinishReason.ERROR
    assert outs["a"].error["type"] == "DeviceError"
    assert "logits are not finite" in outs["a"].error["message"]
    assert outs["b"].new_token_ids == [1]
    engine.scheduler.check_integrity()
    engine.add("c", list(range(13)), max_tokens=1)
    found = [seq for seq in engine.scheduler.schedule().sequences if seq.request_id == "c"]
    assert found[0].start == 0
    assert engine.scheduler.stats().failed == 1


def test_a_missing_token_is_a_bug():
    engine = Engine()
    engine.add("a", [1])
    with pytest.raises(BugError, match="no token for request 'a'"):
        engine.scheduler.update(engine.scheduler.schedule(), RunnerOutput())


def test_a_step_whose_result_never_came_is_scheduled_again():
    engine = Engine()
    engine.add("a", [1, 2, 3])
    engine.step()
    lost = engine.scheduler.schedule()
    again = engine.step()
    assert shares(lost) == shares(again)
    assert engine.scheduler.update(lost, RunnerOutput(sampled={"a": 1})) == []  # too late
    engine.run()
    assert engine.text["a"] == generate([1, 2, 3], 4)


@pytest.mark.parametrize(
    ("prompt", "kw", "message"),
    [
        ([], {}, "no tokens"),
        ([1] * 40, {}, "prompt has 40 tokens, more than the 39 that max_model_len \\(40\\) allows"),
        ([1] * 32, {}, "whole KV cache has room for 31 .*num_blocks"),
        ([1, -1], {}, "token id outside"),
        ([2**32], {}, "token id outside"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"params": {"do_remote_prefill": True}}, "no KV connector"),
        ([1], {"params": {"do_remote_decode": True}}, "no KV connector"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_name(prompt, kw, message):
    engine = Engine(num_blocks=8, max_model_len=40)
    with pytest.raises(RequestError, match=message):
        engine.add("a", prompt, **kw)
    engine.add("a", [1], params={"do_remote_prefill": False})
    engine.run()
    assert engine.text["a"] == generate([1], 4)


def test_an_id_is_used_by_one_request_at_a_time():
    engine = Engine()
    engine.add("a", [1])
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add("a", [2])
    engine.run()
    engine.last.clear()
    engine.add("a", [2])


def test_too_many_waiting_requests_are_a_capacity_error():
    engine = Engine(max_waiting=2)
    engine.add("a", [1])
    engine.add("b", [1])
    with pytest.raises(CapacityError, match="max_waiting"):
        engine.add("c", [1])
    engine.step()
    engine.add("c", [1])


@pytest.mark.parametrize(
    "setting", ["max_num_seqs", "max_num_batched_tokens", "max_waiting", "handoff_lease_s", "remote_kv_timeout_s"]
)
def test_settings_are_checked_at_the_door(setting):
    with pytest.raises(ConfigurationError, match=f"{setting} is 0"):
        SchedulerConfig(**{setting: 0})


def test_stats_count_what_happened():
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", list(range(13)), max_tokens=3)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.steps, stats.prompt_tokens, stats.computed_tokens, stats.generated_tokens, stats.finished) == (4, 13, 15, 3, 1)
    assert (stats.running, stats.waiting, stats.admission_open) == (0, 0, True)


def test_finished_requests_are_named_to_the_next_step_once():
    engine = Engine()
    engine.add("a", [1], max_tokens=1)
    engine.add("b", [1], max_tokens=3)
    engine.run()
    assert [out.finished_request_ids for out in engine.steps] == [[], ["a"], []]
    engine.add("c", [1], max_tokens=1)
    engine.run()
    assert engine.steps[-1].finished_request_ids == ["b"]


def test_nothing_to_do_is_none():
    assert Engine().scheduler.schedule() is None
