"""The router's connections to engines are bounded: what requests meet that find none, and what it says of the engines."""

from __future__ import annotations

import asyncio

import pytest
from web_fakes import client_of, completion, live, server_app

from torpor.router import Router, RouterConfig, create_app
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
