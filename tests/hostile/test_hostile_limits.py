"""Prompts and parameters at every limit and beyond it: served, or refused by name; whoever asks meanwhile is answered as ever."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_kit
import httpx
import pytest
import pytest_asyncio
import torch
from engine_models import save_model, tiny_engine
from tiny_models import GREEDY
from web_fakes import client_of, server_app

from torpor.engine.client import InprocEngineClient
from torpor.engine.frontend import Frontend
from torpor.engine.sampler import sample
from torpor.engine.tokenizer import Tokenizer
from torpor.errors import RequestError
from torpor.request import SamplingParams
from torpor.scheduler.output import ScheduledSequence
from torpor.scheduler.token_counts import TokenCounts
from torpor.server import ServerConfig, create_app
from torpor.testing.fake_engine import FakeEngine
from torpor.testing.tokenizers import byte_tokenizer

pytestmark = [pytest.mark.timeout(1800 if hostile_kit.SCALE > 1 else 120), pytest.mark.asyncio(loop_scope="module")]
CONTEXT, BLOCKS, BLOCK = 100, 48, 4
QUESTION = {"prompt": "a question", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass
class Engine:
    client: httpx.AsyncClient
    reference: list[int]

    async def send(self, body: Any, path: str = "/v1/completions") -> httpx.Response:
        return await self.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    async def is_unharmed(self) -> None:
        assert await self.answer() == self.reference
        stats = (await self.client.get("/memory")).json()
        assert stats["cache"]["allocated_blocks"] == 0
        assert stats["steps_failed"] == 0, "a request broke a step, and everybody in it"

    async def answer(self) -> list[int]:
        found = await self.send(QUESTION)
        assert found.status_code == 200, found.text
        return list(found.json()["choices"][0]["token_ids"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


async def start(stack: AsyncExitStack, model: Path, server: dict[str, Any] | None = None, **settings: Any) -> Engine:
    made = await InprocEngineClient.start(tiny_engine(model, block_size=BLOCK, **settings), timeout_s=90)
    stack.push_async_callback(made.shutdown)
    client = await stack.enter_async_context(client_of(create_app(Frontend.for_client(made), ServerConfig(**(server or {})))))
    client.timeout = httpx.Timeout(60)
    engine = Engine(client, [])
    engine.reference = await engine.answer()
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        yield await start(stack, model, max_model_len=CONTEXT, num_blocks=BLOCKS)


HUGE = 10**400
BODIES: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": [5] * (CONTEXT - 1), "max_tokens": 1}, 200, None),
    ({"prompt": [5] * (CONTEXT - 1), "max_tokens": 2**62}, 200, None),
    ({"prompt": [5] * CONTEXT}, 400, "prompt"),
    ({"prompt": [5] * (CONTEXT + 1)}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [256]}, 200, None),
    ({"prompt": [257]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [2**31]}, 400, "prompt"),
    ({"prompt": [HUGE]}, 400, "prompt"),
    ({"prompt": ["a"] * 1025}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, "prompt"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": ""}], "max_tokens": 1}, 200, None),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": "\ud800"}, "max_tokens": 1}, 200, None),
    *(({"max_tokens": n}, 400, "max_tokens") for n in (0, -1, 2**63, HUGE, 1.5, True, "5")),
    *(({"min_tokens": n}, 400, "min_tokens") for n in (-1, 9, 2**63, HUGE)),
    *(({"top_k": n}, 400, "top_k") for n in (-2, 2**63, HUGE)),
    ({"top_k": 2**63 - 1, "temperature": 1}, 200, None),
    *(({"temperature": t}, 400, "temperature") for t in (-1e-9, 100.1, 1e308, HUGE)),
    *(({"temperature": t}, 200, None) for t in (0, 1e-300, 1e-5, 100)),
    *(({"top_p": p}, 400, "top_p") for p in (0, -1, 1.0001, HUGE)),
    *(({"top_p": p, "temperature": 1}, 200, None) for p in (1e-320, 1e-38, 1)),
    *(({"min_p": p}, 400, "min_p") for p in (-0.1, 1.1)),
    *(({"repetition_penalty": r}, 400, "repetition_penalty") for r in (0, -1, 1e-320, 1e-38, 0.009, 100.1)),
    *(({"repetition_penalty": r, "temperature": 2e-5}, 200, None) for r in (0.01, 100)),
    *(({"seed": s, "temperature": 1}, 200, None) for s in (-(2**63), 2**63 - 1)),
    *(({"seed": s}, 400, "seed") for s in (2**63, -(2**63) - 1, HUGE, 0.5)),
    *(({"n": n}, 400, "n") for n in (0, -1, 65, HUGE)),
    ({"n": 64, "max_tokens": 1, "temperature": 1}, 200, None),
    *(({"logprobs": n}, 400, "logprobs") for n in (-1, 21, HUGE)),
    ({"logprobs": 20}, 200, None),
    ({"stop": ["a"] * 65}, 400, "stop"),
    ({"stop": ["a" * 1025]}, 400, "stop"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": [chr(33 + i) * 1024 for i in range(64)]}, 200, None),
    ({"stop_token_ids": [5] * 1025}, 400, "stop_token_ids"),
    ({"stop_token_ids": [257]}, 400, "stop_token_ids"),
    ({"model": "a" * 100_000}, 404, "model"),
    ({"model": "\ud800"}, 404, "model"),
    ({"kv_transfer_params": {"a": "\ud800"}}, 400, "kv_transfer_params"),
    ({"kv_transfer_params": {"a": 2**64}}, 400, "kv_transfer_params"),
    ({"kv_transfer_params": {"a": hostile_kit.nested(17)}}, 400, "kv_transfer_params"),
    ({"kv_transfer_params": {"a": hostile_kit.nested(400)}}, 400, "kv_transfer_params"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params"),
    ({"metadata": {"a": hostile_kit.nested(400), "b": "\ud800", "c": HUGE}}, 200, None),
    ({"metadata": {str(i): i for i in range(129)}}, 400, "metadata"),
]


async def test_at_every_limit_and_beyond(engine: Engine) -> None:
    for change, status, param in BODIES:
        path = "/v1/chat/completions" if "messages" in change else "/v1/completions"
        body = ({} if "messages" in change else {"prompt": "hi", "max_tokens": 8}) | change
        found = await engine.send(body, path)
        about = f"{str(change)[:200]}: {found.status_code} {found.text[:300]}"
        assert found.status_code == status, about
        if status != 200:
            assert (found.json()["error"]["param"] or "").startswith(param or ""), about
            assert len(found.text) < 10_000, "an error that repeats the whole request helps nobody"
        hostile_kit.tried("requests at or beyond a limit")
    await engine.is_unharmed()


@pytest.mark.parametrize(("temperature", "value"), [("NaN", 400), ("Infinity", 400), ("-Infinity", 400), ("1e999", 400)])
async def test_numbers_that_are_none(engine: Engine, temperature: str, value: int) -> None:
    text = f'{{"prompt": "hi", "temperature": {temperature}}}'
    found = await engine.client.post("/v1/completions", content=text, headers={"content-type": "application/json"})
    assert (found.status_code, found.json()["error"]["param"]) == (value, "temperature")


async def test_a_prompt_as_long_as_the_whole_kv_cache(model: Path) -> None:
    async with AsyncExitStack() as stack:
        small = await start(stack, model, num_blocks=16)
        for tokens, status in ((63, 200), (64, 400), (65, 400), (255, 400)):
            found = await small.send({"prompt": [5] * tokens, "max_tokens": 50, "ignore_eos": True})
            assert found.status_code == status, found.text
            if status == 400:
                assert "num_blocks" in found.json()["error"]["message"]
        await small.is_unharmed()


async def test_a_full_queue_is_503_with_retry_after(model: Path) -> None:
    async with AsyncExitStack() as stack:
        busy = await start(stack, model, max_num_seqs=1, max_waiting=2)
        answers = await asyncio.gather(*(busy.send(QUESTION | {"max_tokens": 100}) for _ in range(12)))
        statuses = [a.status_code for a in answers]
        assert set(statuses) == {200, 503}
        for found in answers:
            if found.status_code == 503:
                assert found.json()["error"]["code"] == "over_capacity"
                assert int(found.headers["retry-after"]) >= 1
            else:
                assert found.json()["choices"][0]["token_ids"][:8] == busy.reference
        many = await busy.send(QUESTION | {"prompt": ["a"] * 64, "n": 64})
        assert many.status_code == 503
        await busy.is_unharmed()


FIELDS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "logprobs"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "echo", "prompt", "stream", "stream_options", "ignore_eos"),
    *("kv_transfer_params", "metadata", "user", "model"),
)


async def test_random_bodies_disturb_nobody(engine: Engine) -> None:
    rand = hostile_kit.rng("bodies")
    for _ in range(hostile_kit.scaled(60)):
        bodies = []
        for _ in range(4):
            body = {"prompt": "hi", "max_tokens": 4} | {
                rand.choice(FIELDS): hostile_kit.any_json(rand) for _ in range(rand.choice((1, 1, 2)))
            }
            bodies.append(body)
        *answers, neighbour = await asyncio.gather(*(engine.send(body) for body in bodies), engine.answer())
        assert neighbour == engine.reference
        for body, found in zip(bodies, answers, strict=True):
            assert found.status_code in (200, 400, 404), (str(body)[:500], found.text[:500])
            assert found.status_code == 200 or found.json()["error"]["message"], body
        hostile_kit.tried("random request bodies", len(bodies))
    await engine.is_unharmed()


SIZE = 1 << 20


BOMBS: dict[str, Any] = {
    "prompts of another type": {"prompt": [""] * (SIZE // 4)},
    "empty prompts": {"prompt": [[]] * (SIZE // 4)},
    "prompts": {"prompt": ["a"] * (SIZE // 5)},
    "stop tokens": {"prompt": "a", "stop_token_ids": [""] * (SIZE // 4)},
    "messages": {"messages": [1] * (SIZE // 3)},
    "parts": {"messages": [{"role": "user", "content": [1] * (SIZE // 3)}]},
    "fields": {"prompt": "a"} | {f"k{i}": 1 for i in range(SIZE // 12)},
    "metadata": {"prompt": "a", "metadata": {f"\ud800{i}": 1 for i in range(SIZE // 16)}},
}


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_body_of_a_million_errors_costs_little(bomb: str) -> None:
    """Every wrong item used to be an error of its own: 4 MB took 46 seconds and 3 GB, and nobody else was served meanwhile."""
    path = "/v1/chat/completions" if "messages" in BOMBS[bomb] else "/v1/completions"
    body = json.dumps(BOMBS[bomb])
    async with client_of(server_app(FakeEngine())) as client:
        await client.get("/health")
        before, begun = peak_mib(), time.process_time()
        found = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert found.status_code == 400, found.text[:300]
        assert len(found.text) < 10_000
        assert time.process_time() - begun < 3
        assert peak_mib() - before < 150
    hostile_kit.tried("bodies of a million errors")


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


async def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    """4 MB of text are 19 seconds of tokenizing."""
    tokenizer = Tokenizer(byte_tokenizer())
    assert len(tokenizer.encode("a" * (1 << 16), max_tokens=10)) == 1 << 16  # short enough to look
    for text in ("a" * (4 << 20), "é" * (1 << 20)):
        begun = time.process_time()
        with pytest.raises(RequestError, match="max_model_len") as refused:
            tokenizer.encode(text, max_tokens=4096)
        assert refused.value.param == "prompt"
        assert time.process_time() - begun < 1


async def test_scores_of_any_size_are_sampled_from() -> None:
    """A small temperature over large scores made NaN of them, and of that a token beyond the vocabulary: the next step failed for
    everybody in the batch, and after three the engine ended."""
    for scale in (1.0, 1e10, 1e30, 3e38):
        logits = torch.tensor([[0.1, -0.5, 1.0, 0.3] * 8]).mul(scale)
        for temperature in (1e-5, 2e-5, 1.0, 100.0):
            params = SamplingParams(temperature=temperature, seed=1, top_p=0.9, logprobs=2)
            samples = sample(logits.clone(), [sequence("a", params), sequence("b", GREEDY)][:1])
            assert 0 <= samples.tokens["a"] < 32
            assert logits[0, samples.tokens["a"]] > 0 or scale == 1.0


def sequence(name: str, params: SamplingParams) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=name,
        token_ids=[1],
        start=0,
        block_ids=[0],  # type: ignore[list-item]
        samples=True,
        sampling=params,
        counts=TokenCounts([1], []),
    )
