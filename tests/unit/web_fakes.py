"""What the tests of server and router share: apps over fake engines, a real uvicorn on a free port, a network of apps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from torpor.server import ServerConfig, create_app
from torpor.testing.fake_engine import FakeEngine
from torpor.testing.fake_frontend import fake_frontend
from torpor.web.serve import HttpServer, bind, serve_until, url_of

LOOPBACK = ("127.0.0.1", 40000)


def server_app(engine: FakeEngine, **config: Any) -> ASGIApp:
    return create_app(fake_frontend(engine), ServerConfig(**config))


@asynccontextmanager
async def client_of(app: ASGIApp, peer: tuple[str, int] = LOOPBACK) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose requests come from ``peer``. Errors that the app lets through are answers, as with a real server."""
    transport = httpx.ASGITransport(app=app, client=peer, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://torpor") as client:
        yield client


@asynccontextmanager
async def live(app: ASGIApp, drain_s: float = 1.0) -> AsyncIterator[str]:
    """The app behind a real uvicorn; its URL."""
    sock = bind("127.0.0.1", 0)
    url, started = url_of(sock), asyncio.Event()
    server = HttpServer(app, drain_s, on_started=started.set)
    serving = asyncio.create_task(serve_until(server, sock))
    try:
        await asyncio.wait_for(started.wait(), 5)
        yield url
    finally:
        server.stop()
        server.stop()
        await asyncio.wait_for(serving, 10)


class Network(httpx.AsyncBaseTransport):
    """Hosts by name; a host that is not there refuses the connection."""

    def __init__(self, hosts: Mapping[str, ASGIApp]) -> None:
        self.hosts = dict(hosts)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        app = self.hosts.get(request.url.host)
        if app is None:
            raise httpx.ConnectError("connection refused", request=request)
        return await httpx.ASGITransport(app=app, client=LOOPBACK).handle_async_request(request)


async def eventually(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, "it never came true"
        await asyncio.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """The JSON of a stream's events; the last one must be [DONE], which is left out."""
    lines = [block.removeprefix("data: ") for block in text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def chat(content: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **more}


def completion(prompt: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt, **more}
