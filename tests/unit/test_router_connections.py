"""The router's connections to engines are bounded: what requests meet that find none, and what it says of the engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import pytest
from test_cli_commands import LiveServer
from web_fakes import client_of, completion, events_of, eventually, live, server_app

from torpor.router import Router, RouterConfig, create_app, run_router
from torpor.router.backends import Backend
from torpor.testing.fake_engine import FakeEngine


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_take_all_connections_make_no_engine_silent(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are the probes crowded out, nor is what finds no connection the engine's failure."""
    looks: list[str] = []
    for name in ("saw_ready", "saw_silence"):
        plain = getattr(Backend, name)
        monkeypatch.setattr(Backend, name, lambda *args, plain=plain, name=name: (looks.append(name), plain(*args)))
    engine = FakeEngine("abc")
    engine.hold()
    waits = {"connect_timeout_s": 0.5, "health_timeout_s": 5.0, "health_interval_s": 0.01, "silence_timeout_s": 30.0}
    async with live(server_app(engine)) as url:
        app = create_app(RouterConfig(decode=(url,), max_connections=1, **waits))
        router: Router = app.state.router
        async with client_of(app) as client, router.serving(app):
            asked = asyncio.create_task(client.post("/v1/completions", json=completion(stream=stream)))
            while not engine.active:
                assert not asked.done(), asked.result().text
                await asyncio.sleep(0.001)
            for get in (client.post("/v1/completions", json=completion(stream=stream)), client.get("/v1/models")):
                turned_away = await get
                assert (turned_away.status_code, turned_away.headers["retry-after"]) == (503, "1")
                assert "max_connections" in turned_away.json()["error"]["message"]
            (backend,) = router.decode.backends
            looks.clear()
            while len(looks) < 3:
                await asyncio.sleep(0.001)
            assert set(looks) == {"saw_ready"}
            assert (backend.state.value, backend.stats().failures) == ("ready", 0)
            engine.let_go()
            answer = await asyncio.wait_for(asked, 30)
            assert (answer.status_code, "c" in answer.text) == (200, True)


@pytest.mark.parametrize(("drain_s", "signals"), [(0.5, 1), (60.0, 2)], ids=["when the drain is over", "at the second signal"])
def test_a_router_that_stops_ends_its_streams_with_an_error(
    drain_s: float, signals: int, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[str] = []

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(timeout=20) as client:
            asking = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=completion(stream=True)))
            await eventually(live.engine.is_held)
            for _ in range(signals):
                await asyncio.sleep(0.2)
                os.kill(os.getpid(), signal.SIGINT)
            answers.append((await asking).text)

    tasks: list[asyncio.Future[None]] = []
    with LiveServer(FakeEngine("abcdef")) as live:
        live.engine.hold_after(3)
        config = RouterConfig(decode=(live.url,), port=0, drain_s=drain_s)
        begun = time.monotonic()
        run_router(config, lambda url: tasks.append(asyncio.ensure_future(ask(url))))
        assert time.monotonic() - begun < 20
    assert "the router is stopping" in events_of(answers[0])[-1]["error"]["message"]
    assert len(live.engine.aborted) == 1
    assert not [r for r in caplog.records if r.exc_info]
    assert f"stopping: waiting up to {drain_s:g} s for 1 request" in caplog.text
