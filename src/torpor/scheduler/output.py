"""What one step is: the scheduler's output is everything the runner needs, so the runner holds no state of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torpor.kvcache.types import BlockId
from torpor.request import SamplingParams, TokenLogprobs
from torpor.scheduler.token_counts import TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """One sequence's share of a step: run ``token_ids`` at positions ``start .. start + len(token_ids)``."""

    request_id: str
    token_ids: list[int]  # the tokens of this step (a prefill chunk, or one decode token)
    start: int  # position of token_ids[0]; everything before it is in the KV cache
    block_ids: list[BlockId]  # the whole block table, long enough for start + len(token_ids)
    samples: bool  # the last of token_ids is the end of what is known: sample the next token
    sampling: SamplingParams  # seed is never None here
    counts: TokenCounts  # for penalties; the sequence's own
    forbidden_token_ids: tuple[int, ...] = ()  # end-of-sequence and stop tokens while min_tokens is not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    step: int
    sequences: list[ScheduledSequence]
    connector_metadata: Any = None  # what the connector's scheduler side built for its worker side
    finished_request_ids: list[str] = field(default_factory=list)  # finished since the last step

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """``sampled`` has an entry for exactly the sequences with ``samples`` set that are not in ``failed``. The three sets come
    from the worker connector."""

    sampled: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # no token can be sampled (logits not finite): why. Finish it with ERROR
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    finished_sending: frozenset[str] = frozenset()  # hand-offs a peer has read (or withdrawn): blocks may go
    finished_recving: frozenset[str] = frozenset()  # remote KV has arrived whole and its epoch was checked (P3)
    failed_recving: frozenset[str] = frozenset()  # it did not: recompute (P5)
