"""A real uvicorn on loopback: the official client, disconnects that free blocks, drains, death, ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from typing import Any

import httpx
import openai
import pytest
from web_fakes import chat, completion, eventually, live, server_app

from torpor.demo.fleet import free_port
from torpor.engine.frontend import Frontend
from torpor.errors import ConfigurationError, EngineDeadError
from torpor.server import ServerConfig, run_server
from torpor.testing.fake_engine import FakeEngine
from torpor.testing.fake_frontend import fake_frontend
from torpor.web.serve import bind


@contextlib.asynccontextmanager
async def official_client(engine: FakeEngine, **config: Any) -> Any:
    async with (
        live(server_app(engine, **config)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-12345678", max_retries=0, timeout=10) as client,
    ):
        yield client


async def test_the_official_client_works_unchanged() -> None:
    async with official_client(FakeEngine("abc"), api_key="sk-12345678") as client:
        models = [m.id async for m in client.models.list()]
        assert models == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        whole = await client.completions.create(model="fake", prompt="hi", logprobs=1, stop=["z"], seed=3, user="me")
        assert (whole.choices[0].text, whole.usage.completion_tokens) == ("abc", 4)
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model="fake", messages=messages, n=2, logprobs=True, top_logprobs=1)
        assert [c.message.content for c in answer.choices] == ["abc", "abc"]
        history = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        assert (await client.chat.completions.create(model="fake", messages=history)).choices[0].message.content == "abc"


async def test_the_official_client_streams() -> None:
    async with official_client(FakeEngine("abc")) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abc"
        assert chunks[-1].usage.completion_tokens == 4
        stream = await client.completions.create(model="fake", prompt="hi", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"


async def test_the_official_clients_helper_for_streams() -> None:
    async with official_client(FakeEngine("abc")) as client:
        async with client.chat.completions.stream(model="fake", messages=[{"role": "user", "content": "hi"}]) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "abc"


async def test_the_official_client_raises_its_own_errors() -> None:
    engine = FakeEngine("abcdef")
    async with official_client(engine, api_key="sk-12345678") as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="fake", prompt="x" * 300)
        assert bad.value.param == "prompt"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong-key").completions.create(model="fake", prompt="x")
        engine.fail_at_step = (3, EngineDeadError("gone"))
        stream = await client.completions.create(model="fake", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in stream:
                pass


# ---- clients that leave -------------------------------------------------------------------------------------------------------


async def open_request(url: str, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_before_the_first_token_frees_its_blocks(path: str, stream: bool) -> None:
    engine = FakeEngine()
    engine.hold()
    async with live(server_app(engine)) as url:
        body = {**(chat() if "chat" in path else completion(["a", "b"])), "stream": stream}
        _, writer = await open_request(url, path, body)
        wanted = 1 if "chat" in path else 2
        await eventually(lambda: len(engine.active) == wanted)
        writer.transport.abort()
        await eventually(lambda: not engine.active)
        assert len(engine.aborted) == wanted
        engine.let_go()
        async with httpx.AsyncClient() as client:
            assert (await client.post(url + path, json=body)).status_code == 200


async def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_blocks() -> None:
    engine = FakeEngine("x" * 50)
    async with live(server_app(engine)) as url:
        engine.hold_after(10)
        reader, writer = await open_request(url, "/v1/completions", completion(stream=True, max_tokens=60))
        await reader.readuntil(b"data: ")
        await eventually(engine.is_held)
        writer.transport.abort()
        await eventually(lambda: not engine.active)
        assert len(engine.aborted) == 1


async def test_a_client_that_never_reads_holds_up_nobody() -> None:
    engine = FakeEngine("x" * 200)
    async with live(server_app(engine)) as url:
        _, deaf = await open_request(url, "/v1/completions", completion(stream=True, max_tokens=200, n=8))
        async with httpx.AsyncClient(timeout=10) as client:
            for _ in range(3):
                assert (await client.post(f"{url}/v1/completions", json=completion(max_tokens=2))).status_code == 200
        deaf.transport.abort()
        await eventually(lambda: not engine.active)


# ---- the process --------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def start() -> Frontend:
            raise AssertionError("the model was loaded")

        with pytest.raises(ConfigurationError, match=rf"port {port} .* --port") as caught:
            run_server(ServerConfig(port=port), start)
        assert caught.value.setting == "--port"


@pytest.mark.parametrize(
    ("host", "port", "flag"),
    [("127.0.0.1", 70000, "--port"), ("127.0.0.1", -1, "--port"), ("no.host.invalid", 0, "--host"), ("192.0.2.1", 0, "--host")],
)
def test_an_address_that_is_not_ours_is_a_configuration_error(host: str, port: int, flag: str) -> None:
    with pytest.raises(ConfigurationError, match=flag):
        bind(host, port)


def test_a_signal_drains_and_ends_with_the_engine_shut_down() -> None:
    engines: list[FakeEngine] = []

    async def start() -> Frontend:
        engines.append(FakeEngine("abc"))
        engines[0].hold()
        return fake_frontend(engines[0])

    answers: list[int] = []

    def on_started(frontend: Frontend, url: str) -> None:
        async def ask() -> None:
            async with httpx.AsyncClient(timeout=10) as client:
                asking = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=completion()))
                await eventually(lambda: bool(engines[0].active))
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
                engines[0].let_go()
                answers.append((await asking).status_code)

        tasks.append(asyncio.ensure_future(ask()))

    tasks: list[asyncio.Future[None]] = []
    run_server(ServerConfig(port=0, drain_s=5), start, on_started)
    assert answers == [200]
    assert engines[0].state.value == "dead"


def test_a_drain_is_bounded_and_aborts_what_still_runs() -> None:
    engines: list[FakeEngine] = []
    tasks: list[asyncio.Future[None]] = []

    async def start() -> Frontend:
        engines.append(FakeEngine())
        engines[0].hold()
        return fake_frontend(engines[0])

    def on_started(frontend: Frontend, url: str) -> None:
        async def ask() -> None:
            async with httpx.AsyncClient(timeout=10) as client:
                asking = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=completion()))
                await eventually(lambda: bool(engines[0].active))
                os.kill(os.getpid(), signal.SIGINT)
                with contextlib.suppress(httpx.HTTPError):
                    await asking

        tasks.append(asyncio.ensure_future(ask()))

    run_server(ServerConfig(port=0, drain_s=1), start, on_started)
    assert engines[0].active == set()
    assert len(engines[0].aborted) == 1


def test_the_engines_death_ends_the_server_with_an_error() -> None:
    async def start() -> Frontend:
        return fake_frontend(FakeEngine())

    with pytest.raises(EngineDeadError):
        run_server(ServerConfig(port=0), start, lambda frontend, url: frontend.client.die())  # type: ignore[attr-defined]


def test_a_signal_while_the_model_loads_ends_the_load() -> None:
    ended = []

    async def start() -> Frontend:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        raise AssertionError("not reached")

    run_server(ServerConfig(port=0), start)
    assert ended == [True]


def test_an_error_at_the_start_is_raised_and_the_port_is_free_again() -> None:
    port = free_port()

    async def start() -> Frontend:
        raise ConfigurationError("no such model", setting="MODEL", value="x")

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="no such model"):
            run_server(ServerConfig(port=port), start)
