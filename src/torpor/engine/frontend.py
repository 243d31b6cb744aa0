"""The text-level front of an engine: checks at the door, choices, and text as it comes. What the server and ``LLM`` stand on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from torpor.engine.base import EngineClient, EngineInfo
from torpor.engine.output_processor import OutputProcessor, TextDelta
from torpor.engine.sampling_checks import (
    check_length,
    check_range,
    check_sampling_params,
    check_token_ids,
    check_transfer_params,
    plain_sampling,
    plain_token_ids,
)
from torpor.engine.tokenizer import Tokenizer
from torpor.errors import BugError, RemoteError, RequestError
from torpor.request import FinishReason, GenerationRequest, SamplingParams

MAX_CHOICES = 64
SEED_MODULUS = 1 << 63

__all__ = ["Frontend", "TextDelta"]


class Frontend:
    """Belongs to the event loop of its client."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer) -> None:
        self._client = client
        self._tokenizer = tokenizer

    @classmethod
    def for_client(cls, client: EngineClient, *, trust_remote_code: bool = False) -> Frontend:
        """With the tokenizer of the client's model. Reads files."""
        return cls(client, Tokenizer.load(client.info.tokenizer_path, trust_remote_code=trust_remote_code))

    @property
    def client(self) -> EngineClient:
        return self._client

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def vocab_size(self) -> int:
        """The model's: token ids beyond it cannot be looked up."""
        return self.info.vocab_size or self._tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, special tokens added as the tokenizer does. RequestError for a text that cannot fit."""
        return self._tokenizer.encode(text, max_tokens=self.info.max_model_len)

    def encode_chat(self, messages: Sequence[dict[str, Any]], template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation through the model's chat template. RequestError when it has none or refuses."""
        return self._tokenizer.encode_chat(messages, template_kwargs, max_tokens=self.info.max_model_len)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, for logprobs."""
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """No text shows it, unless ``skip_special_tokens`` is off."""
        return self._tokenizer.is_special(token_id)

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, n: int = 1, *, param: str = "prompt") -> None:
        """RequestError naming the field that is wrong: what can be known without asking the engine. ``param`` is the one that the
        prompt was made of."""
        check_range("n", n, 1, MAX_CHOICES, integer=True)
        check_sampling_params(sampling, self.vocab_size)
        if not prompt_token_ids:
            raise RequestError("the prompt is empty: it has no tokens", param=param)
        check_token_ids(param, prompt_token_ids, self.vocab_size)
        tokens, info = len(prompt_token_ids), self.info
        check_length(param, tokens, info.max_model_len, "the context (max_model_len)", "max_model_len")
        check_length(param, tokens, info.num_blocks * info.block_size, "the whole KV cache", "num_blocks")

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        n: int = 1,
        kv_transfer_params: dict[str, Any] | None = None,
        param: str = "prompt",
    ) -> AsyncGenerator[TextDelta, None]:
        """The choices' deltas as they come. Closing the generator aborts what still runs. Raises torpor.errors, also in the
        middle; ``param`` as in ``check``.

        Choice i > 0 of a seeded request has the seed plus i. A transfer of KV is for the first choice; the others share its
        prompt through the prefix cache.
        """
        self.check(prompt_token_ids, sampling, n, param=param)
        check_transfer_params(kv_transfer_params)
        prompt_token_ids, sampling = plain_token_ids(prompt_token_ids), plain_sampling(sampling)
        choices = [
            self._choice(
                index,
                GenerationRequest(
                    request_id=request_id if n == 1 else f"{request_id}-{index}",
                    prompt_token_ids=prompt_token_ids,
                    sampling=_seeded(sampling, index),
                    eos_token_ids=self.info.eos_token_ids,
                    arrival_time=time.monotonic(),
                    kv_transfer_params=kv_transfer_params if index == 0 else None,
                ),
            )
            for index in range(n)
        ]
        async with aclosing(choices[0] if n == 1 else _merged(choices)) as deltas:
            async for delta in deltas:
                yield delta

    async def _choice(self, index: int, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        processor = OutputProcessor(self._tokenizer, request.prompt_token_ids, request.sampling, index)
        async with aclosing(self._client.generate(request)) as outputs:
            async for output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    raise RemoteError.decode(output.error) if output.error else BugError("the engine failed without an error")
                delta = processor.process(output)
                yield delta
                if delta.finish_reason is not None:
                    return  # closing the stream aborts a request that the engine would go on with


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % SEED_MODULUS)


async def _merged(streams: list[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """Deltas of all streams in the order they come. The first error ends all of them."""
    queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
