"""A real uvicorn on loopback: the official client, disconnects that free blocks, drains, death, ports."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from web_fakes import chat, completion, events_of, eventually, live, server_app

from torpor.demo.fleet import free_port
from torpor.engine.base import SleepRequest
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


TERMINATE, INTERRUPT = (functools.partial(os.kill, os.getpid(), number) for number in (signal.SIGTERM, signal.SIGINT))


def stopped_while_held(drain_s: float, act: Callable[[FakeEngine], Awaitable[None]], **body: Any) -> tuple[str, float]:
    """A server whose one request gets no further by itself, and what is then done to it: the answer ("": it was cut), and how
    long it took."""
    engine, answers = FakeEngine(), []

    async def start() -> Frontend:
        engine.hold_after(3)
        return fake_frontend(engine)

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(timeout=20) as client:
            asking = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=completion(**body)))
            await eventually(lambda: bool(engine.active) and engine.is_held())
            await act(engine)
            with contextlib.suppress(httpx.HTTPError):
                answers.append((await asking).text)

    tasks: list[asyncio.Future[None]] = []
    started = time.monotonic()
    run_server(ServerConfig(port=0, drain_s=drain_s), start, lambda frontend, url: tasks.append(asyncio.ensure_future(ask(url))))
    assert engine.active == set()
    assert len(engine.aborted) == 1
    return "".join(answers), time.monotonic() - started


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_drain_is_bounded_and_what_still_runs_ends_with_an_error(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def act(engine: FakeEngine) -> None:
        INTERRUPT()

    text, took_s = stopped_while_held(0.5, act, stream=stream)
    assert 0.5 <= took_s < 5
    last = events_of(text)[-1] if stream else json.loads(text)
    assert last["error"]["code"] == "engine_dead"
    assert "the server is stopping" in last["error"]["message"]
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert lines == ["stopping: waiting up to 0.5 s for 1 request; once more to end them"]


def test_a_second_signal_ends_requests_with_an_error_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def act(engine: FakeEngine) -> None:
        INTERRUPT()
        await asyncio.sleep(0.3)
        INTERRUPT()

    text, took_s = stopped_while_held(60, act, stream=True)
    assert took_s < 10
    assert "the server is stopping" in events_of(text)[-1]["error"]["message"]
    assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.parametrize("state", ["asleep", "paused"])
def test_requests_that_are_frozen_are_not_waited_for(state: str, caplog: pytest.LogCaptureFixture) -> None:
    async def act(engine: FakeEngine) -> None:
        await engine.sleep(SleepRequest(level=1 if state == "asleep" else 0, mode="keep"))
        TERMINATE()

    text, took_s = stopped_while_held(60, act, stream=True)
    assert took_s < 10
    assert "the server is stopping" in events_of(text)[-1]["error"]["message"]
    assert f"1 request cannot go on, since the engine is {state}: ended now" in caplog.text


def test_a_request_that_does_not_end_when_told_is_cut_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "end_requests", lambda self, why: None)

    async def act(engine: FakeEngine) -> None:
        INTERRUPT()

    assert stopped_while_held(0.1, act, stream=True)[0] == ""
    assert "what has not ended 1 s later is cut" in caplog.text
    assert not [r for r in caplog.records if r.exc_info]


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

    assert run_server(ServerConfig(port=0), start) is signal.SIGTERM
    assert ended == [True]


def test_an_error_at_the_start_is_raised_and_the_port_is_free_again() -> None:
    port = free_port()

    async def start() -> Frontend:
        raise ConfigurationError("no such model", setting="MODEL", value="x")

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="no such model"):
            run_server(ServerConfig(port=port), start)
