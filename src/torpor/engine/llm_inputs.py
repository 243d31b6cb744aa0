"""What ``LLM`` may be asked: one prompt or several, one conversation or several. What is neither is refused, never dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from torpor.errors import ConfigurationError, RequestError
from torpor.request import SamplingParams

Prompt: TypeAlias = "str | Sequence[int]"
Messages: TypeAlias = "list[dict[str, Any]]"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """A text, or a list of token ids (also numpy's), is one prompt. RequestError naming the first that is neither."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, "prompts", "a text, token ids, or a list of these")
    if items and all(isinstance(item, Integral) for item in items):
        return [_token_ids(items)]
    return [item if isinstance(item, str) else _prompt(index, item) for index, item in enumerate(items)]


def as_conversations(conversations: Messages | Sequence[Messages]) -> list[Messages]:
    """A list of messages is one conversation. RequestError naming the first item that is neither one nor a message."""
    items = _items(conversations, "conversations", "a list of messages, or a list of such lists")
    if items and all(isinstance(item, dict) for item in items):
        return [items]
    return [_conversation(index, item) for index, item in enumerate(items)]


def one_each(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise ConfigurationError(
            f"{len(sampling)} sampling parameters for {count} prompts: give one for all, or one each", setting="sampling"
        )
    return list(sampling)


def _items(given: object, what: str, wanted: str) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, dict)):
        raise RequestError(f"{what} must be {wanted}, not {_shown(given)}", param=what)
    return list(given)


def _prompt(index: int, item: object) -> list[int]:
    if isinstance(item, Iterable) and not isinstance(item, (bytes, dict)):
        ids = list(item)
        if all(isinstance(token_id, Integral) for token_id in ids):
            return _token_ids(ids)
    raise RequestError(
        f"prompts[{index}] must be a text or a list of token ids, not {_shown(item)}", param="prompts", index=index
    )


def _token_ids(ids: Sequence[Any]) -> list[int]:
    """Plain ones. A bool is no token id: it stays, to be refused at the door."""
    return [token_id if isinstance(token_id, bool) else int(token_id) for token_id in ids]


def _conversation(index: int, item: object) -> Messages:
    if isinstance(item, (list, tuple)) and all(isinstance(message, dict) for message in item):
        return list(item)
    raise RequestError(
        f"conversations[{index}] must be a list of messages, which are dicts, not {_shown(item)}",
        param="conversations",
        index=index,
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"
