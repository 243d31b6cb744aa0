"""Sampling: what each parameter leaves in, that frequencies follow probabilities, and that only (seed, position) decides."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.engine import sampler
from torpor.engine.sampler import sample, uniform
from torpor.request import SamplingParams
from torpor.scheduler.output import ScheduledSequence
from torpor.scheduler.token_counts import TokenCounts

VOCAB = 50


def sequence(
    name: str = "a", *, position: int = 3, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> ScheduledSequence:
    forbidden = params.pop("forbidden", ())
    return ScheduledSequence(
        request_id=name,
        token_ids=[1],
        start=position - 1,
        block_ids=[],
        samples=True,
        sampling=SamplingParams(**{"seed": 7} | params),
        counts=TokenCounts(prompt or [1, 2], output or []),
        forbidden_token_ids=forbidden,
    )


def logits(seed: int = 0, rows: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draws(row: torch.Tensor, count: int, **params: Any) -> Counter[int]:
    """Tokens drawn at ``count`` positions from the same logits."""
    sequences = [sequence(str(i), position=i + 1, **params) for i in range(count)]
    return Counter(sample(row.repeat(count, 1), sequences).tokens.values())


def close_to(counts: Counter[int], probs: torch.Tensor, count: int) -> None:
    """Within five standard deviations of a binomial, for every token."""
    for token, p in enumerate(probs.tolist()):
        deviation = math.sqrt(max(p * (1 - p) * count, 1))
        assert abs(counts[token] - p * count) <= 5 * deviation, token


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, [9, 4]] = 5.0
    assert sample(row, [sequence(temperature=0)]).tokens == {"a": 4}


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    row = logits()
    close_to(draws(row, 4000, temperature=0.7), torch.softmax(row[0] / 0.7, 0), 4000)


def test_top_k_leaves_k_tokens_with_their_odds() -> None:
    row = logits()
    keep = row[0].topk(5).indices
    probs = torch.zeros(VOCAB).index_copy_(0, keep, torch.softmax(row[0, keep], 0))
    close_to(draws(row, 3000, top_k=5), probs, 3000)


def test_top_p_leaves_the_fewest_tokens_that_reach_it() -> None:
    row = torch.log(torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]))
    assert draws(row, 600, top_p=0.69).keys() == {0, 1}
    assert draws(row, 600, top_p=0.71).keys() == {0, 1, 2}
    assert draws(row, 200, top_p=1e-9).keys() == {0}
    assert draws(row, 200, top_p=1e-50).keys() == {0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    row = torch.log(torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]))
    assert draws(row, 800, min_p=0.25).keys() == {0, 1, 2}


def test_top_p_is_of_what_top_k_leaves() -> None:
    row = torch.log(torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]]))
    assert draws(row, 400, top_k=2, top_p=0.57).keys() == {0}  # 0.4 of the 0.7 left is 0.571
    assert draws(row, 400, top_k=2, top_p=0.58).keys() == {0, 1}


def test_top_p_looks_beyond_the_sorted_head() -> None:
    """A nearly flat distribution over more tokens than are sorted at first."""
    vocab = 4 * sampler._HEAD
    row = -torch.arange(vocab)[None] * 1e-5
    seen = draws(row, 500, top_p=0.5)
    assert sampler._HEAD < max(seen) <= vocab // 2


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    temperature=st.floats(0.1, 3.0),
)
def test_what_is_left_in_equals_a_plain_filter(seed: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    """Against the definition, token by token; no draw may fall outside."""
    row = logits(seed)
    probs = torch.softmax(row[0] / temperature, 0).double().numpy()
    order = [int(i) for i in np.argsort(-probs) if probs[i] >= min_p * probs.max() * (1 - 1e-6)]
    order = order[: top_k or VOCAB]
    before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
    mass = probs[order].sum()
    allowed = {token for token, b in zip(order, before, strict=True) if top_p == 1.0 or b < top_p * mass * (1 + 1e-5)}
    drawn = draws(row, 60, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert drawn.keys() <= allowed


def test_a_token_depends_on_seed_and_position_only() -> None:
    row = logits(scale=0.5)
    alone = sample(row.clone(), [sequence(seed=11, position=40)]).tokens["a"]
    crowd = [sequence(str(i), seed=i, position=i + 1, top_k=3 if i % 2 else 0, top_p=0.9) for i in range(20)]
    batch = torch.cat([logits(i, scale=3.0) for i in range(20)] + [row])
    assert sample(batch, [*crowd, sequence(seed=11, position=40)]).tokens["a"] == alone
    other_seeds = {sample(row.clone(), [sequence(seed=s, position=40)]).tokens["a"] for s in range(30)}
    other_positions = {sample(row.clone(), [sequence(seed=11, position=p)]).tokens["a"] for p in range(1, 31)}
    assert len(other_seeds) > 5
    assert len(other_positions) > 5


def test_a_sequence_computed_again_in_one_piece_draws_the_same() -> None:
    """After a preemption the same position is sampled at the end of a prompt chunk instead of a decode."""
    row = logits(scale=0.5)
    decode = [sequence(seed=s, position=12) for s in range(20)]
    for one in decode:
        again = dataclasses.replace(one, token_ids=[1] * 9, start=3)
        assert sample(row.clone(), [again]).tokens == sample(row.clone(), [one]).tokens


def test_uniform_is_uniform_and_fixed() -> None:
    values = np.array([uniform(seed, position) for seed in range(40) for position in range(100)])
    assert 0 < values.min() < values.max() < 1
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 400).max() < 5 * math.sqrt(400)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06
    assert uniform(5, 9) == pytest.approx(0.0933418952, abs=1e-9), "streams of earlier versions must not change"


def test_repetition_penalty_over_prompt_and_output() -> None:
    row = torch.tensor([[2.0, -1.0, 1.5, -2.0, 1.9]])
    result = sample(row, [sequence(temperature=0, prompt=[0, 1], output=[4], repetition_penalty=2.0, logprobs=5)])
    expected = torch.log_softmax(torch.tensor([1.0, -2.0, 1.5, -2.0, 0.95]), 0)
    assert result.tokens == {"a": 2}
    found = dict(zip(result.logprobs["a"].top_ids, result.logprobs["a"].top_logprobs, strict=True))
    assert [found[i] for i in range(5)] == pytest.approx(expected.tolist(), abs=1e-6)


def test_frequency_and_presence_penalties_over_the_output() -> None:
    row = torch.tensor([[3.0, 2.9, 2.8, 0.0]])
    assert sample(row.clone(), [sequence(temperature=0, prompt=[0], output=[])]).tokens["a"] == 0
    once = sequence(temperature=0, prompt=[1], output=[0], presence_penalty=0.15)
    assert sample(row.clone(), [once]).tokens["a"] == 1, "the prompt does not count"
    often = sequence(temperature=0, output=[0, 0, 1], frequency_penalty=0.15)
    assert sample(row.clone(), [often]).tokens["a"] == 2


def test_penalties_of_many_rows_are_each_row_s_own() -> None:
    """Against the definition, row by row; rows that ask for nothing stay as they were."""
    rng = np.random.default_rng(5)
    kinds: list[dict[str, float]] = [{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"presence_penalty": -0.4}]
    kinds.append({"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 1.1})
    sequences, expected, rows = [], [], logits(9, rows=20)
    for index, row in enumerate(rows.double().tolist()):
        prompt, output = rng.integers(0, VOCAB, 30).tolist(), rng.integers(0, VOCAB, int(rng.integers(0, 40))).tolist()
        params = kinds[index % len(kinds)]
        sequences.append(sequence(str(index), temperature=0, prompt=prompt, output=output, logprobs=VOCAB, **params))
        by, counts = params.get("repetition_penalty", 1.0), Counter(output)
        for token in {*prompt, *output}:
            row[token] = row[token] / by if row[token] > 0 else row[token] * by
        for token, count in counts.items():
            row[token] -= params.get("frequency_penalty", 0.0) * count + params.get("presence_penalty", 0.0)
        expected.append(torch.log_softmax(torch.tensor(row, dtype=torch.float64), 0))
    together = sample(rows.clone(), sequences)
    for index, table in enumerate(expected):
        found = together.logprobs[str(index)]
        assert found.top_logprobs == pytest.approx(table[found.top_ids].tolist(), abs=1e-5)
        alone = sample(rows[index : index + 1].clone(), [sequences[index]])
        assert alone.logprobs[str(index)] == found
        assert alone.tokens[str(index)] == together.tokens[str(index)]


def test_forbidden_tokens_are_never_chosen_nor_listed() -> None:
    row = torch.zeros(1, 5)
    row[0, 3] = 9.0
    result = sample(row.clone(), [sequence(temperature=0, forbidden=(3,), logprobs=5)])
    assert result.tokens["a"] == 0
    assert 3 not in result.logprobs["a"].top_ids
    assert draws(row, 200, forbidden=(3, 1)).keys() == {0, 2, 4}


def test_logprobs_are_after_penalties_and_before_temperature() -> None:
    row = logits(4)
    table = torch.log_softmax(row[0], 0)
    result = sample(row.clone(), [sequence(temperature=0.3, top_k=1, logprobs=3)]).logprobs["a"]
    best = int(row.argmax())
    assert result.token_id == best
    assert result.rank == 1
    assert result.logprob == pytest.approx(float(table[best]), abs=1e-5)
    assert result.top_ids == row[0].topk(3).indices.tolist()
    assert result.top_logprobs == pytest.approx(table.topk(3).values.tolist(), abs=1e-5)
    none_listed = sample(row.clone(), [sequence(temperature=0, logprobs=0)]).logprobs["a"]
    assert none_listed.top_ids == []
    assert sample(row.clone(), [sequence(temperature=0)]).logprobs == {}


def test_rank_of_an_unlikely_token() -> None:
    row = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    result = sample(row, [sequence(temperature=0, forbidden=(0,), logprobs=1)])
    assert result.logprobs["a"].rank == 1, "ranks are among the tokens that are allowed"
    hot = [sequence(str(i), position=i + 1, temperature=5.0, logprobs=0) for i in range(40)]
    table = sample(torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(40, 1), hot)
    assert {(lp.token_id, lp.rank) for lp in table.logprobs.values()} == {(0, 1), (1, 2), (2, 3), (3, 4)}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_own_sequence(bad: float) -> None:
    rows = logits(rows=3)
    rows[1, 17] = bad
    result = sample(rows, [sequence("x"), sequence("y", top_p=0.5, logprobs=2), sequence("z", temperature=0)])
    assert result.failed.keys() == {"y"}
    assert result.tokens.keys() == {"x", "z"}
    assert result.logprobs == {}


def test_nothing_allowed_fails_the_sequence() -> None:
    assert sample(torch.zeros(1, 3), [sequence(forbidden=(0, 1, 2))]).failed.keys() == {"a"}


def test_half_precision_logits() -> None:
    rows = logits(rows=2).bfloat16()
    assert sample(rows.clone(), [sequence(temperature=0), sequence("b", top_p=0.9)]).tokens["a"] == int(rows[0].argmax())


def test_what_top_p_leaves_in_does_not_depend_on_the_company() -> None:
    """torch adds up one long row with several threads, many rows with one each: in float32 the edge of top_p moved by a token."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        probs = torch.softmax(logits(seed=1, rows=16, vocab=1 << 16), dim=-1)
        together = sampler._floor([(0, 0.95)] * 16, probs)
        alone = [sampler._floor([(0, 0.95)], row[None]) for row in probs]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, torch.cat(alone))
