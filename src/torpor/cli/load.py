"""The load of ``torpor bench``: streaming completions, a fixed number at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from torpor.cli.client import error_fields, in_our_words, in_plain_words
from torpor.errors import PeerError

WORDS = ("winter", "river", "stone", "lamp", "garden", "paper", "quiet", "signal", "harbour", "copper", "meadow", "letter")


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    url: str
    requests: int
    concurrency: int
    prompts: tuple[str, ...]  # empty: generated ones of input_words words
    input_words: int
    max_tokens: int
    ignore_eos: bool
    model: str | None
    seed: int
    timeout_s: float
    api_key: str | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request, as its client saw it. Times are from its start."""

    first_token_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def per_token_s(self) -> float:
        return (self.total_s - self.first_token_s) / max(1, self.tokens - 1)


async def run_load(client: httpx.AsyncClient, config: LoadConfig, on_done: Callable[[], None]) -> list[Sample]:
    """One sample per request; one that fails is a sample with its error. PeerError when the server cannot be asked at all."""
    model = config.model or await first_model(client, config)
    prompts = make_prompts(config)
    samples: list[Sample] = []

    async def worker() -> None:
        for prompt in prompts:
            samples.append(await one_request(client, config, model, prompt))
            on_done()

    await asyncio.gather(*(worker() for _ in range(config.concurrency)))
    return samples


def make_prompts(config: LoadConfig) -> Iterator[str]:
    """Prompts that share no prefix, so that a prefix cache does not answer for the engine; or the given ones in turn."""
    draw = random.Random(config.seed)
    for i in range(config.requests):
        if config.prompts:
            yield config.prompts[i % len(config.prompts)]
        else:
            yield " ".join([f"{draw.getrandbits(32):x}", *draw.choices(WORDS, k=config.input_words - 1)])


async def first_model(client: httpx.AsyncClient, config: LoadConfig) -> str:
    try:
        answer = await client.get(f"{config.url}/v1/models", headers=headers_of(config))
        if answer.status_code != 200:
            raise ValueError(words_of(answer, config))
        return str(answer.json()["data"][0]["id"])
    except httpx.ConnectError as e:
        raise PeerError(f"cannot reach {config.url}: {in_plain_words(e)}", peer=config.url) from e
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as e:
        raise PeerError(f"{config.url}/v1/models did not name a model: {in_plain_words(e)}", peer=config.url) from e


async def one_request(client: httpx.AsyncClient, config: LoadConfig, model: str, prompt: str) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": config.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if config.ignore_eos else {}),
    }
    try:
        return await asyncio.wait_for(timed(client, config, body), config.timeout_s)
    except asyncio.TimeoutError:
        return Sample(error=f"no answer within {config.timeout_s:g} s")
    except httpx.ConnectError as e:
        return Sample(error=f"cannot reach {config.url}: {e}")
    except httpx.HTTPError as e:
        return Sample(error=f"{type(e).__name__}: {e}")
    except (ValueError, TypeError, AttributeError, LookupError) as e:  # a line that broke off, or what no server should send
        return Sample(error=f"no event of a completion: {type(e).__name__}: {e}")


async def timed(client: httpx.AsyncClient, config: LoadConfig, body: dict[str, object]) -> Sample:
    started = time.perf_counter()
    first: float | None = None
    usage: dict[str, int] = {}
    async with client.stream("POST", f"{config.url}/v1/completions", json=body, headers=headers_of(config)) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return Sample(error=words_of(answer, config))
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return Sample(error=str(chunk["error"].get("message")))
            if chunk.get("choices") and first is None:
                first = time.perf_counter() - started
            usage = chunk.get("usage") or usage
    total = time.perf_counter() - started
    tokens, prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    return Sample(first_token_s=first or total, total_s=total, tokens=tokens, prompt_tokens=prompt_tokens)


def words_of(answer: httpx.Response, config: LoadConfig) -> str:
    return f"HTTP {answer.status_code}: {in_our_words(str(error_fields(answer)['message']), config.url)}"


def headers_of(config: LoadConfig) -> dict[str, str]:
    return {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
