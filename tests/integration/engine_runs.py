"""What the engine's integration tests share: an engine that runs, and requests to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from torpor.engine.client import AsyncEngineClient
from torpor.engine.config import EngineConfig
from torpor.request import EngineOutput, GenerationRequest, SamplingParams

START_S = 90.0


@asynccontextmanager
async def running(config: EngineConfig, **options: Any) -> AsyncIterator[AsyncEngineClient]:
    client = await AsyncEngineClient.start(config, timeout_s=START_S, **options)
    try:
        yield client
    finally:
        await client.shutdown()


def request(request_id: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 12, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | sampling)
    return GenerationRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=params)


async def outputs_of(client: AsyncEngineClient, item: GenerationRequest) -> list[EngineOutput]:
    async with aclosing(client.generate(item)) as stream:
        return [output async for output in stream]


async def tokens_of(client: AsyncEngineClient, item: GenerationRequest) -> list[int]:
    return [t for output in await outputs_of(client, item) for t in output.new_token_ids]
