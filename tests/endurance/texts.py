"""Requests whose answers are known, and who asks them and looks at what comes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torpor.engine.base import EngineClient
from torpor.errors import AsleepError
from torpor.request import FinishReason, GenerationRequest, SamplingParams

_numbers = itertools.count()


@dataclass(frozen=True)
class Text:
    """A request and the one right answer to it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    answer: tuple[int, ...] = ()

    def request(self, transfer: dict[str, Any] | None = None, max_tokens: int | None = None) -> GenerationRequest:
        values = {**_as_dict(self.sampling), **({"max_tokens": max_tokens} if max_tokens else {})}
        return GenerationRequest(
            request_id=f"r{next(_numbers)}",
            prompt_token_ids=list(self.prompt),
            sampling=SamplingParams(**values),
            kv_transfer_params=transfer,
        )


class End(Enum):
    WHOLE = "whole"
    ABORTED = "aborted"  # by a sleep of mode abort
    ASLEEP = "asleep"  # refused: the engine sleeps
    LEFT = "left"  # the client closed its stream


@dataclass(frozen=True)
class Outcome:
    end: End
    tokens: tuple[int, ...] = ()
    transfer: dict[str, Any] | None = None


def make_texts(rng: random.Random, count: int, vocabulary: int = 250) -> list[Text]:
    """Greedy and sampled, short and long; some share a beginning, so that the prefix cache has something to be wrong about."""
    common = tuple(rng.randrange(vocabulary) for _ in range(24))
    texts = []
    for number in range(count):
        own = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(3, 40)))
        greedy = {"temperature": 0.0}
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": number}
        kind = rng.choice([greedy, greedy, sampled])
        sampling = SamplingParams(max_tokens=rng.randint(6, 40), ignore_eos=True, **kind)
        texts.append(Text(common + own if number % 2 else own, sampling))
    return texts


async def with_answers(client: EngineClient, texts: Sequence[Text]) -> list[Text]:
    """What the engine says before it ever slept, one request at a time."""
    answered = []
    for text in texts:
        outcome = await ask(client, text)
        if len(set(outcome.tokens)) > 2:  # a text that repeats one token would prove nothing
            answered.append(Text(text.prompt, text.sampling, outcome.tokens))
    assert len(answered) > len(texts) // 2
    return answered


async def ask(
    client: EngineClient,
    text: Text,
    *,
    transfer: dict[str, Any] | None = None,
    max_tokens: int | None = None,
    leave_after: int | None = None,
) -> Outcome:
    """Whatever comes must be the beginning of the answer; all of it, unless the outcome says why not."""
    tokens: list[int] = []
    end, handed_over = End.LEFT, None
    try:
        async with aclosing(client.generate(text.request(transfer, max_tokens))) as stream:
            async for output in stream:
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    assert output.finish_reason is not FinishReason.ERROR, output.error
                    end = End.ABORTED if output.finish_reason is FinishReason.ABORT else End.WHOLE
                    handed_over = output.kv_transfer_params
                elif leave_after is not None and len(tokens) >= leave_after:
                    break
    except AsleepError:
        assert not tokens, "a request that had begun was refused"
        end = End.ASLEEP
    if text.answer:
        check(text, tokens, end, max_tokens)
    return Outcome(end, tuple(tokens), handed_over)


def check(text: Text, tokens: Sequence[int], end: End, max_tokens: int | None) -> None:
    right = text.answer[:max_tokens]
    assert tuple(tokens) == right[: len(tokens)], f"wrong answer to {text.prompt}: {tokens}, not {right}"
    if end is End.WHOLE:
        assert len(tokens) == len(right), f"{len(tokens)} of {len(right)} tokens"


def _as_dict(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}
