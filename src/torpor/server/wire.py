"""Request bodies of the OpenAI routes, with vLLM's extras. Strict: a wrong type or an unknown field is a 400 that names it.

Fields OpenAI knows and we do not are refused unless they ask for nothing (null, an empty list, the default): clients send those.
Harmless ones (``user``, ``metadata``, ...) are accepted and have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from torpor.engine.sampling_checks import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, MAX_TEMPERATURE, REPETITION_PENALTIES

MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
MAX_PROMPTS = 1024
MAX_PROMPT_TOKENS = 1 << 21
MAX_MESSAGES = 1 << 14
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_FIELDS = 128
MAX_INTEGER = 2**63 - 1  # what fits on the wire to the engine

# Without fail_fast a list of a million wrong items is a million errors: minutes, and gigabytes.
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Prompt = Annotated[str, Field(min_length=1)]
Prompts = Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
TokenPrompts = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


def check_few(data: Any) -> Any:
    """Each unknown or wrong field of an object is an error of its own."""
    if isinstance(data, dict) and len(data) > MAX_FIELDS:
        raise PydanticCustomError(
            "too_many_fields",
            "an object may have {most} fields at most, this one has {found}",
            {"most": MAX_FIELDS, "found": len(data)},
        )
    return data


def check_prompt(data: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Here, because pydantic would speak of the first of four types that did not fit."""
    try:
        return validate(data)
    except ValidationError:
        raise PydanticCustomError("prompt", "{what}", {"what": wrong_prompt(data)}) from None


def wrong_prompt(data: Any) -> str:
    """What keeps it from being what it, or its first item, promises to be."""
    if isinstance(data, str):
        return _wrong_text(data)
    first = data[0] if isinstance(data, list) and data else data
    check = next((check for kind, check in _WRONG.items() if isinstance(first, kind)), None)
    if not isinstance(data, list) or check is None:
        return "a text, token ids, or a list of either is needed"
    what, most = ("token ids", MAX_PROMPT_TOKENS) if check is _wrong_token else ("prompts", MAX_PROMPTS)
    return _wrong_item(data, check, what, most)


def _wrong_item(data: list[Any], check: Callable[[Any], str], what: str, most: int) -> str:
    if not 0 < len(data) <= most:
        return f"a list of 1 to {most} {what} is needed, this one has {len(data)}"
    return next((f"item {index}: {wrong}" for index, item in enumerate(data) if (wrong := check(item))), "")


def _wrong_text(item: Any) -> str:
    if not isinstance(item, str):
        return "a text is needed, as the first item is one"
    try:
        item.encode()
    except UnicodeEncodeError as error:
        return f"the text is not valid Unicode: {error}"
    return "" if item else "a text must not be empty"


def _wrong_token(item: Any) -> str:
    fits = type(item) is int and 0 <= item <= MAX_TOKEN_ID
    return "" if fits else f"token ids are integers from 0 to {MAX_TOKEN_ID}"


def _wrong_tokens(item: Any) -> str:
    if not isinstance(item, list):
        return "a list of token ids is needed, as the first item is one"
    return _wrong_item(item, _wrong_token, "token ids", MAX_PROMPT_TOKENS)


_WRONG: dict[type, Callable[[Any], str]] = {str: _wrong_text, int: _wrong_token, list: _wrong_tokens}

Extras = Annotated[dict[str, Any], BeforeValidator(check_few)]

UNSUPPORTED: dict[str, str] = {
    "tools": "tool calling",
    "tool_choice": "tool calling",
    "parallel_tool_calls": "tool calling",
    "tool_calls": "tool calling",
    "functions": "function calling",
    "function_call": "function calling",
    "audio": "audio",
    "modalities": "output but text",
    "prediction": "predicted outputs",
    "web_search_options": "web search",
    "response_format": "structured output",
    "structured_outputs": "structured output",
    "guided_json": "structured output",
    "guided_regex": "structured output",
    "guided_choice": "structured output",
    "guided_grammar": "structured output",
    "logit_bias": "logit bias",
    "reasoning_effort": "reasoning control",
    "verbosity": "verbosity control",
    "suffix": "insertion",
    "best_of": "best_of: ask for n",
    "use_beam_search": "beam search",
    "prompt_logprobs": "log-probabilities of prompts",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
}


def drop_neutral(data: Any) -> Any:
    """Without the unsupported fields that ask for nothing."""
    if not isinstance(data, dict):
        return data
    check_few(data)
    return {k: v for k, v in data.items() if not (k in UNSUPPORTED and _is_neutral(k, v))}


def _is_neutral(name: str, value: Any) -> bool:
    return (
        value is None or value == [] or value == {} or any(value == n and type(value) is type(n) for n in NEUTRAL.get(name, ()))
    )


class StrictModel(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = Field(None, description="accepted, no effect")


class KVTransferParams(BaseModel):
    """vLLM's field names plus torpor's epoch. Checked by the connector, which owns their meaning."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")


class GenerationBody(StrictModel):
    """What both routes share. A null is the default."""

    model: str | None = Field(None, description="the served model; null for it as well")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=64)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    # vLLM's extras
    top_k: int | None = Field(None, ge=-1, le=MAX_INTEGER, description="0 and -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    min_tokens: int | None = Field(None, ge=0, le=MAX_INTEGER)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = Field(None, description="adds token_ids to every choice, and prompt_token_ids")
    kv_transfer_params: Annotated[KVTransferParams, BeforeValidator(check_few)] | None = None
    # accepted, no effect
    user: str | None = None
    metadata: Extras | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        return drop_neutral(data)

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        return None if self.kv_transfer_params is None else self.kv_transfer_params.model_dump()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(GenerationBody):
    prompt: Annotated[Prompt | Prompts | Tokens | TokenPrompts, WrapValidator(check_prompt)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    name: str | None = Field(None, description="accepted, no effect")

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        """An answer's own message, sent back, has nulls of its kind."""
        data = drop_neutral(data)
        if isinstance(data, dict):
            data = {k: v for k, v in data.items() if not (k in ("refusal", "annotations", "reasoning") and not v)}
        return data

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)}


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: Extras | None = Field(None, description="variables of the model's chat template")
