"""What a request is on the wire between the front end and the engine core.

Plain frozen structs (msgspec), no torch, no behaviour. Times are seconds; tokens are ids of the model's vocabulary.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class FinishReason(enum.Enum):
    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the client or an operator ended it
    ERROR = "error"  # the engine could not go on with it; EngineOutput.error says why


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. Ranges are checked by ``torpor.engine.sampling_checks`` at the door (RequestError names the field).

    A request's random numbers depend on (seed, position) alone, so a preempted or frozen request goes on with the same text.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: chosen at admission
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: and the k most likely
    skip_special_tokens: bool = True


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate (``n`` > 1 is n of these, made by the front end). Immutable; the scheduler keeps its own state."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0  # time.monotonic() of the front end, for figures only
    kv_transfer_params: dict[str, Any] | None = None  # vLLM's field names, plus torpor's epoch


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of one generated position, natural logarithm, after penalties and before temperature."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step produced for one request. The last one carries ``finish_reason``."""

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache or from a peer
    kv_transfer_params: dict[str, Any] | None = None
    error: dict[str, Any] | None = None  # RemoteError.encode
