"""Checks at the door: a request whose parameters cannot be served is refused before it reaches the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import msgspec

from torpor.errors import ContextLengthError, RequestError
from torpor.request import SamplingParams

MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 100.0)  # beyond them float32 logits overflow
MAX_STOP_TOKEN_IDS = 1024
_MAX_INTEGER = (1 << 63) - 1  # what fits on the wire
_SEED_RANGE = (-(1 << 63), (1 << 64) - 1)
_MAX_TRANSFER_DEPTH = 16
_MAX_TRANSFER_BYTES = 8 << 20

# field: lowest, highest allowed value
_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": REPETITION_PENALTIES,
}
_INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, _MAX_INTEGER),
    "min_tokens": (0, _MAX_INTEGER),
    "top_k": (0, _MAX_INTEGER),
}
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_LISTS = ("stop", "stop_token_ids")
_OPTIONAL_INTEGERS: dict[str, tuple[int, int]] = {"seed": _SEED_RANGE, "logprobs": (0, MAX_LOGPROBS)}


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """RequestError whose ``param`` is the first field that is out of range, or of a type that the engine's process cannot read:
    it would end, and with it everybody's requests."""
    for name, (low, high) in _NUMBERS.items():
        check_range(name, getattr(params, name), low, high)
    for name, (low, high) in _INTEGERS.items():
        check_range(name, getattr(params, name), low, high, integer=True)
    for name, (low, high) in _OPTIONAL_INTEGERS.items():
        if getattr(params, name) is not None:
            check_range(name, getattr(params, name), low, high, integer=True)
    check_range("top_p", params.top_p, 0.0, 1.0, above=True)
    if params.min_tokens > params.max_tokens:
        raise _refusal("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    for name in _SWITCHES:
        if not isinstance(getattr(params, name), bool):
            raise _refusal(name, getattr(params, name), "True or False")
    for name in _LISTS:
        if not isinstance(getattr(params, name), (tuple, list)):
            raise _refusal(name, getattr(params, name), "a tuple or a list")
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise _refusal("stop", text, "a string that is not empty")
        if not _is_unicode(text):
            raise _refusal("stop", text, "a string of valid Unicode")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:  # each of them is looked at with every token
        raise _refusal("stop_token_ids", len(params.stop_token_ids), f"a list of at most {MAX_STOP_TOKEN_IDS}")
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def plain_sampling(params: SamplingParams) -> SamplingParams:
    """Checked ones as what can be sent to the engine: numpy's numbers, and subclasses of Python's, cannot."""
    fields: dict[str, Any] = {name: float(getattr(params, name)) for name in (*_NUMBERS, "top_p")}
    fields |= {name: int(getattr(params, name)) for name in _INTEGERS}
    for name in _OPTIONAL_INTEGERS:
        value = getattr(params, name)
        fields[name] = None if value is None else int(value)
    fields["stop"] = tuple("".join(text) for text in params.stop)  # str() of an enum's member is its name
    fields["stop_token_ids"] = tuple(map(int, params.stop_token_ids))
    return msgspec.structs.replace(params, **fields)


def plain_token_ids(token_ids: Sequence[int]) -> list[int]:
    """The same of checked token ids."""
    if isinstance(token_ids, list) and set(map(type, token_ids)) == {int}:
        return token_ids
    return list(map(int, token_ids))


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """RequestError when one is not a token of the vocabulary: the model would look it up beyond its tables."""
    if not token_ids:
        return
    for kind in set(map(type, token_ids)):
        if kind is bool or not issubclass(kind, Integral):
            raise _refusal(param, next(t for t in token_ids if type(t) is kind), "token ids, which are integers")
    worst = max(token_ids) if max(token_ids) >= vocab_size else min(token_ids)
    if not 0 <= worst < vocab_size:
        raise _refusal(param, worst, f"token ids from 0 to {vocab_size - 1}")


def check_length(param: str, tokens: int, limit: int, what: str, setting: str) -> None:
    """ContextLengthError when so many tokens leave no room for one of the answer in ``what``, which ``setting`` could enlarge."""
    if tokens >= limit:
        raise ContextLengthError(
            f"the prompt has {tokens} tokens, but {what} has room for {limit}, one of them for the answer: shorten it, or start "
            f"the engine with a larger {setting}",
            param=param,
            tokens=tokens,
            limit=limit,
            setting=setting,
        )


def check_transfer_params(params: dict[str, Any] | None) -> None:
    """RequestError unless it can be sent to the engine: plain JSON data of bounded size. What it means is the connector's."""
    if params is None:
        return
    try:
        nbytes = len(msgspec.msgpack.encode(params))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # half a surrogate pair, numbers beyond 64 bits
        raise _bad_transfer(f"cannot be sent to the engine: {error}") from error
    if nbytes > _MAX_TRANSFER_BYTES:
        raise _bad_transfer(f"take {nbytes} bytes, at most {_MAX_TRANSFER_BYTES} are allowed")
    layer: list[object] = [params]
    for _ in range(_MAX_TRANSFER_DEPTH):
        layer = [part for value in layer for part in _inner(value) if isinstance(part, (dict, list))]
        if not layer:
            return
    raise _bad_transfer(f"are nested more than {_MAX_TRANSFER_DEPTH} deep")


def _is_unicode(text: str) -> bool:
    """Half a surrogate pair is not, and cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _inner(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _bad_transfer(reason: str) -> RequestError:
    return RequestError(f"kv_transfer_params {reason}", param="kv_transfer_params")


def check_range(name: str, value: Any, low: float, high: float, *, integer: bool = False, above: bool = False) -> None:
    """RequestError unless it is a number (also one of numpy's) from ``low`` to ``high``."""
    number = not isinstance(value, bool) and isinstance(value, Integral if integer else Real)
    # NaN and the infinities fail the comparison; integers of any size survive it.
    fits = number and low <= value <= high
    if fits and not (above and value == low):
        return
    kind = "an integer" if integer else "a number"
    floor = f"above {low:g}" if above else f"of at least {low:g}"
    raise _refusal(name, value, f"{kind} {floor} and at most {high if integer else f'{high:g}'}")


def _refusal(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{name} must be {wanted}, not {value!r}", param=name, value=value)
