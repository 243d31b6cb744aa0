"""Checks at the door: a request whose parameters cannot be served is refused before it reaches the scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torpor.errors import RequestError
from torpor.request import SamplingParams

MAX_LOGPROBS = 20
_SEED_RANGE = (-(1 << 63), (1 << 64) - 1)  # what fits on the wire

# field: lowest, highest allowed value
_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
_INTEGERS: dict[str, tuple[int, float]] = {"max_tokens": (1, math.inf), "min_tokens": (0, math.inf), "top_k": (0, math.inf)}
_OPTIONAL_INTEGERS: dict[str, tuple[int, float]] = {"seed": _SEED_RANGE, "logprobs": (0, MAX_LOGPROBS)}


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """RequestError whose ``param`` is the first field that is out of range."""
    for name, (low, high) in _NUMBERS.items():
        _in_range(name, getattr(params, name), low, high)
    for name, (low, high) in _INTEGERS.items():
        _in_range(name, getattr(params, name), low, high, integer=True)
    for name, (low, high) in _OPTIONAL_INTEGERS.items():
        if getattr(params, name) is not None:
            _in_range(name, getattr(params, name), low, high, integer=True)
    for name in ("top_p", "repetition_penalty"):
        _in_range(name, getattr(params, name), 0.0, 1.0 if name == "top_p" else math.inf, above=True)
    if params.min_tokens > params.max_tokens:
        raise _refusal("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise _refusal("stop", text, "a string that is not empty")
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """RequestError when one is not a token of the vocabulary: the model would look it up beyond its tables."""
    if not token_ids:
        return
    worst = max(token_ids) if max(token_ids) >= vocab_size else min(token_ids)
    if not 0 <= worst < vocab_size:
        raise _refusal(param, worst, f"token ids from 0 to {vocab_size - 1}")


def _in_range(name: str, value: object, low: float, high: float, *, integer: bool = False, above: bool = False) -> None:
    kinds = (int,) if integer else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if fits and not (above and value == low):
        return
    kind = "an integer" if integer else "a number"
    floor = f"above {low:g}" if above else f"of at least {low:g}"
    raise _refusal(name, value, f"{kind} {floor}" + (f" and at most {high:g}" if math.isfinite(high) else ""))


def _refusal(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{name} must be {wanted}, not {value!r}", param=name, value=value)
