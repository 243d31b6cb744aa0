"""Choosing the next token of each sequence from its logits.

Every decision about a sequence follows from its own logits, parameters, seed and position: what else is in the batch changes
nothing, and a sequence that is computed again after a preemption or a sleep gets the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torpor.request import TokenLogprobs
from torpor.scheduler.output import ScheduledSequence

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
GREEDY_BELOW = 1e-5  # temperatures under it are greedy: dividing by them would only lose precision
_HEAD = 1024  # how many of the likeliest tokens are sorted at first; nearly always top_p is reached within them


@dataclass(frozen=True, slots=True)
class Samples:
    """By request id. Every sequence is in exactly one of ``tokens`` and ``failed``."""

    tokens: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # why
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """logits [R, vocabulary] -> the likeliest token of each row, the first of equals; -1 where the row has no finite peak (NaN
    anywhere, or nothing allowed). [R] int64."""
    peaks, best = logits.max(dim=-1)
    return torch.where(peaks.isfinite(), best, -1)


def sample(logits: torch.Tensor, sequences: Sequence[ScheduledSequence], best: torch.Tensor | None = None) -> Samples:
    """logits [R, vocabulary], one row per sequence; overwritten. Logits that are not finite fail their own sequence only.

    ``best``: ``likeliest`` of the logits, where that is known already. Blocks until the tokens are on the host.
    """
    if all(map(_takes_likeliest, sequences)):
        chosen = (likeliest(logits) if best is None else best).tolist()
        return _samples(sequences, chosen)
    scores = logits.to(torch.float32)
    _penalise(scores, sequences)
    chosen = likeliest(scores).tolist()
    drawn = [i for i, s in enumerate(sequences) if chosen[i] >= 0 and s.sampling.temperature >= GREEDY_BELOW]
    if drawn:
        tokens = _draw(scores[drawn], [sequences[i] for i in drawn]).tolist()
        for i, token in zip(drawn, tokens, strict=True):
            chosen[i] = token
    return _samples(sequences, chosen, _logprobs(scores, sequences, chosen))


def _takes_likeliest(sequence: ScheduledSequence) -> bool:
    """Its token is the likeliest one of the logits as they are, and nothing else is asked of them."""
    p = sequence.sampling
    return p.temperature < GREEDY_BELOW and p.logprobs is None and not _changes_scores(sequence)


def _changes_scores(sequence: ScheduledSequence) -> bool:
    p = sequence.sampling
    return bool(p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty or sequence.forbidden_token_ids)


def _samples(
    sequences: Sequence[ScheduledSequence], chosen: Sequence[int], logprobs: dict[str, TokenLogprobs] | None = None
) -> Samples:
    tokens = {s.request_id: token for s, token in zip(sequences, chosen, strict=True) if token >= 0}
    if len(tokens) == len(sequences):
        return Samples(tokens, {}, logprobs or {})
    why = "the model's output is not finite, or min_tokens forbids every token left"
    failed = {s.request_id: why for s, token in zip(sequences, chosen, strict=True) if token < 0}
    return Samples(tokens, failed, logprobs or {})


def uniform(seed: int, position: int) -> float:
    """The random number in (0, 1) of a request's ``position``: the same on every machine and in every version of torch."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=5).digest()
    return (int.from_bytes(digest, "little") + 0.5) / (1 << 40)


def _penalise(scores: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> None:
    """Repetition over prompt and output, then frequency and presence over the output, then what min_tokens forbids. In place; as
    many copies to the device and kernels for all rows as for one."""
    repeated, counted = [], []
    for index, sequence in enumerate(sequences):
        p = sequence.sampling
        if p.repetition_penalty != 1.0:
            ids, _ = map(np.array, sequence.counts.seen())
            repeated.append((index, ids, np.full(len(ids), p.repetition_penalty)))
        if p.frequency_penalty or p.presence_penalty:
            ids, counts = map(np.array, sequence.counts.seen())
            ids, counts = ids[counts > 0], counts[counts > 0]
            counted.append((index, ids, p.frequency_penalty * counts + p.presence_penalty))
    if repeated:
        where, factors = _entries(repeated, scores.device)
        values = scores[where]
        scores[where] = torch.where(values > 0, values / factors, values * factors)
    if counted:
        where, amounts = _entries(counted, scores.device)
        scores[where] -= amounts
    for row, sequence in zip(scores, sequences, strict=True):
        if sequence.forbidden_token_ids:
            row[list(sequence.forbidden_token_ids)] = float("-inf")


def _entries(
    rows: Sequence[tuple[int, IntArray, FloatArray]], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(row, distinct columns, a number for each) of some rows -> an index of all these places, and the numbers, float32."""
    columns = np.concatenate([ids for _, ids, _ in rows])
    numbers = np.concatenate([values for _, _, values in rows]).astype(np.float32)
    index = np.stack([np.repeat([row for row, _, _ in rows], [len(ids) for _, ids, _ in rows]), columns])
    places = torch.from_numpy(index).to(device)
    return (places[0], places[1]), torch.from_numpy(numbers).to(device)


def _draw(scores: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> torch.Tensor:
    """scores [R, vocabulary] -> tokens [R]: temperature, min_p, top_k and top_p, then the token at each one's random number."""
    params = [s.sampling for s in sequences]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]

    # Less their peak first: a small temperature would otherwise make infinities of large scores, and NaN of those.
    peaks = scores.amax(dim=-1, keepdim=True)
    probs = torch.softmax((scores - peaks) / column([p.temperature for p in params]), dim=-1)
    if any(p.min_p > 0 for p in params):
        floor = probs.amax(dim=-1, keepdim=True) * column([p.min_p for p in params])
        probs = probs.masked_fill_(probs < floor, 0)
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:
        floor = _floor([(params[i].top_k, params[i].top_p) for i in cut], probs[cut])
        probs[cut] = probs[cut].masked_fill_(probs[cut] < floor, 0)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    numbers = [uniform(s.sampling.seed or 0, s.start + len(s.token_ids)) for s in sequences]
    targets = cumulative[:, -1:] * torch.tensor(numbers, dtype=torch.float64, device=scores.device)[:, None]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def _floor(limits: Sequence[tuple[int, float]], probs: torch.Tensor, head: int = _HEAD) -> torch.Tensor:
    """The least probability [R, 1] that (top_k, top_p) leave in; tokens that tie with it stay in too. top_p is of what top_k
    leaves.

    Sums are float64: torch adds up one row in another order than many, and float32 would tell at the edge of top_p."""
    size = min(probs.shape[-1], max(head, *(k for k, _ in limits)))
    values = probs.topk(size, dim=-1).values
    ranks = torch.arange(size, device=probs.device)
    top_k = torch.tensor([k or probs.shape[-1] for k, _ in limits], device=probs.device)[:, None]
    top_p = torch.tensor([p if p < 1 else 2.0 for _, p in limits], dtype=torch.float64, device=probs.device)[:, None]
    values = values.masked_fill(ranks >= top_k, 0)
    of_head, of_all = (v.sum(dim=-1, keepdim=True, dtype=torch.float64) for v in (values, probs))
    mass = torch.where(top_k <= size, of_head, of_all)
    before = values.cumsum(dim=-1, dtype=torch.float64).sub_(values)
    values = values.masked_fill((before >= top_p * mass) & (ranks > 0), 0)  # the least top_p there is leaves the likeliest
    if size < probs.shape[-1] and bool((values[:, -1] > 0).any()):
        return _floor(limits, probs, probs.shape[-1])
    kept = (values > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    return values.gather(-1, kept - 1)


def _logprobs(scores: torch.Tensor, sequences: Sequence[ScheduledSequence], chosen: list[int]) -> dict[str, TokenLogprobs]:
    wanted = [i for i, s in enumerate(sequences) if chosen[i] >= 0 and s.sampling.logprobs is not None]
    if not wanted:
        return {}
    table = torch.log_softmax(scores[wanted], dim=-1)
    own = table.gather(-1, torch.tensor([[chosen[i]] for i in wanted], device=scores.device))
    ranks = (table > own).sum(dim=-1) + 1
    top = table.topk(min(table.shape[-1], max(1, *(sequences[i].sampling.logprobs or 0 for i in wanted))), dim=-1)
    result = {}
    for row, i in enumerate(wanted):
        count = sequences[i].sampling.logprobs or 0
        pairs = [(t, p) for t, p in zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True) if p > float("-inf")]
        result[sequences[i].request_id] = TokenLogprobs(
            token_id=chosen[i],
            logprob=float(own[row, 0]),
            rank=int(ranks[row]),
            top_ids=[token for token, _ in pairs[:count]],
            top_logprobs=[value for _, value in pairs[:count]],
        )
    return result
