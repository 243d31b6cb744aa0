"""The admin doors of an engine and the router's doors, with bad input: no 5xx, nothing stuck, the same answers afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hostile_kit
import httpx
import pytest
import pytest_asyncio
from engine_models import save_model, tiny_engine
from web_fakes import Network, client_of, server_app

from torpor.engine.client import InprocEngineClient
from torpor.engine.frontend import Frontend
from torpor.router import RouterConfig
from torpor.router import create_app as create_router
from torpor.server import create_app
from torpor.testing.fake_engine import FakeEngine

pytestmark = [pytest.mark.timeout(1800 if hostile_kit.SCALE > 1 else 120), pytest.mark.asyncio(loop_scope="module")]
ROUTES = ("/sleep", "/wake_up", "/pause", "/resume", "/release_kv_cache_memory", "/update_weights")
QUERY = {
    "level": ("0", "1", "2", "3", "-1", "1.5", "", "x", "99999999999999999999", "\x00", "1\ud7ff"),
    "mode": ("wait", "keep", "abort", "", "WAIT", "x" * 1000),
    "deadline_s": ("0.001", "1", "5e-324", "0", "-1", "nan", "inf", "1e999", "86401", "x"),
    "tags": ("weights", "kv_cache", "runtime", "weights,kv_cache", "", ",", "nobody", "weights,nobody", "x" * 3000),
    "unknown": ("1",),
}
BODIES: tuple[Any, ...] = (
    {"policies": {"kv_cache": "discard"}},
    {"policies": {"kv_cache": "keep", "weights": "host"}},
    {"policies": {"nobody": "host"}},
    {"policies": {"weights": "burn"}},
    {"policies": {}},
    {"policies": {str(i): "host" for i in range(1000)}},
    {"level": 1, "policies": {"weights": "host"}},
    {"level": True},
    {"deadline_s": 10**400},
    {"mode": "keep", "level": 1},
    {"model": "/nowhere"},
    {"model": "../" * 300},
    {"model": "a\x00b"},
    {"model": ["x"]},
)
AUTH = {"content-type": "application/json"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder: Path = save_model(tmp_path_factory.mktemp("model"))
    made = await InprocEngineClient.start(tiny_engine(folder), timeout_s=90)
    async with client_of(create_app(Frontend.for_client(made))) as client:
        client.timeout = httpx.Timeout(60)
        yield client
    await made.shutdown()


async def answer(client: httpx.AsyncClient) -> Any:
    body = {"prompt": "a question", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = await client.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["token_ids"]


async def test_random_admin_calls_leave_an_engine_that_answers_as_before(engine: httpx.AsyncClient) -> None:
    rand = hostile_kit.rng("admin")
    reference = await answer(engine)
    for round_ in range(hostile_kit.scaled(150)):
        query = [(name, rand.choice(QUERY[name])) for name in rand.sample([*QUERY], rand.choice((0, 1, 1, 2)))]
        body = rand.choice((None, None, rand.choice(BODIES), hostile_kit.any_json(rand)))
        content = None if body is None else json.dumps(body)
        route = rand.choice(ROUTES)
        found = await asyncio.wait_for(engine.post(route, params=query, content=content, headers=AUTH), 60)
        assert found.status_code in (200, 400, 409), (route, query, content, found.text)
        assert found.status_code == 200 or found.json()["error"]["message"]
        hostile_kit.tried("random admin calls")
        if round_ % 15 == 14:
            await restored(engine, reference)
    await restored(engine, reference)


async def restored(engine: httpx.AsyncClient, reference: Any) -> None:
    assert (await engine.post("/wake_up")).status_code == 200
    if (await engine.get("/is_sleeping")).json()["state"] == "paused":
        assert (await engine.post("/resume")).status_code == 200
    assert (await engine.get("/ready")).status_code == 200
    assert await answer(engine) == reference


@pytest_asyncio.fixture(loop_scope="module")
async def router() -> AsyncIterator[httpx.AsyncClient]:
    network = Network({"p": server_app(FakeEngine("abc", connector=True)), "d": server_app(FakeEngine("abc"))})
    app = create_router(RouterConfig(prefill=("http://p",), decode=("http://d",)), network)
    async with app.router.lifespan_context(app), client_of(app) as client:
        yield client


async def test_random_bodies_at_the_router(router: httpx.AsyncClient) -> None:
    rand = hostile_kit.rng("router")
    good = {"prompt": "hi", "max_tokens": 4, "stream": False, "n": 1, "metadata": {"a": {"b": 1}}}
    for _ in range(hostile_kit.scaled(200)):
        how = rand.random()
        body = json.dumps(hostile_kit.any_json(rand) if how < 0.2 else hostile_kit.mutated_object(rand, good)).encode()
        if how > 0.8:
            body = hostile_kit.mutated_bytes(rand, body)
        path = rand.choice(("/v1/completions", "/v1/completions", "/v1/chat/completions"))
        headers = AUTH | ({"authorization": "Bearer \xff\xe9"} if rand.random() < 0.1 else {})
        found = await router.post(path, content=body, headers={k.encode(): v.encode("latin-1") for k, v in headers.items()})
        assert found.status_code in (200, 400, 404, 422), (body[:500], found.status_code, found.text[:500])
        hostile_kit.tried("random bodies at the router")
    assert (await router.post("/v1/completions", json={"prompt": "hi"})).json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"prompt":' + b"[" * 100_000, b"\xff", b"nul", b'{"prompt": NaN}', b"", b"1" * 5000]
)
async def test_bodies_that_are_no_json_are_400_at_the_router(router: httpx.AsyncClient, body: bytes) -> None:
    found = await router.post("/v1/completions", content=body, headers=AUTH)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["message"]
