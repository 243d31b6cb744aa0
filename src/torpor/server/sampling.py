"""From a request body to SamplingParams. Ranges are the wire types' and the engine's; here is what depends on several fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from torpor.errors import RequestError
from torpor.request import SamplingParams
from torpor.server.wire import ChatBody, CompletionBody, GenerationBody

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")


def completion_sampling(body: CompletionBody) -> SamplingParams:
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "echo with logprobs needs log-probabilities of the prompt, which torpor does not compute", param="echo"
        )
    return SamplingParams(max_tokens=body.max_tokens or DEFAULT_COMPLETION_TOKENS, logprobs=body.logprobs, **_common(body))


def chat_sampling(body: ChatBody, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """With no limit given, the rest of the context."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, max_model_len - num_prompt_tokens)
    return SamplingParams(max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None, **_common(body))


def _common(body: GenerationBody) -> dict[str, Any]:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "seed": body.seed,
        "stop": _stop_strings(body.stop),
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "ignore_eos": body.ignore_eos,
        "min_tokens": body.min_tokens,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "skip_special_tokens": body.skip_special_tokens,
    }
    return {k: v for k, v in given.items() if v is not None}


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt of a request: its choices are ``first_index .. first_index + n - 1``."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int
    first_index: int
    kv_transfer_params: dict[str, Any] | None
    param: str = "prompt"  # the body's field that the prompt was made of
