"""Real servers on loopback for hostile clients: in a thread with a loop of its own, over a fake engine or a real tiny one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_kit  # noqa: F401  (the path of the modules below)
from engine_models import save_model, tiny_engine
from starlette.types import ASGIApp

from torpor.engine.client import AsyncEngineClient, InprocEngineClient
from torpor.engine.frontend import Frontend
from torpor.server import ServerConfig, create_app
from torpor.testing.fake_engine import FakeEngine
from torpor.testing.fake_frontend import fake_frontend
from torpor.web.connections import ConnectionLimits
from torpor.web.serve import HttpServer, bind, serve_until, url_of

START_S = 90.0
AppMaker = Callable[[], contextlib.AbstractAsyncContextManager[ASGIApp]]


@contextlib.contextmanager
def serving(make_app: AppMaker, limits: ConnectionLimits | None = None) -> Iterator[str]:
    """The URL of the app, which lives on another thread until the block ends. The kernel holds little for clients that do not
    read."""
    started, urls, failures = threading.Event(), [], []
    stop: list[Callable[[], Any]] = []

    async def run() -> None:
        async with make_app() as app:
            sock = bind("127.0.0.1", 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)  # inherited by connections
            urls.append(url_of(sock))
            server = HttpServer(app, 1.0, on_started=started.set, limits=limits)
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(server.stop))
            await serve_until(server, sock)

    thread = threading.Thread(target=lambda: _into(failures, run()), daemon=True)
    thread.start()
    try:
        while not started.wait(0.05):
            assert thread.is_alive(), failures
        yield urls[0]
    finally:
        for patience_s in (5.0, START_S):  # the second call does not wait for open requests
            for end in stop:
                with contextlib.suppress(RuntimeError):
                    end()
            thread.join(patience_s)
        assert not thread.is_alive(), "the server does not stop"
        assert not failures, failures


def _into(failures: list[BaseException], work: Awaitable[None]) -> None:
    try:
        asyncio.run(work)  # type: ignore[arg-type]
    except BaseException as error:
        failures.append(error)


def fake_app(engine: FakeEngine, **config: Any) -> AppMaker:
    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[ASGIApp]:
        yield create_app(fake_frontend(engine), ServerConfig(**config))

    return make


def tiny_app(folder: Path, *, in_process: bool = False, **settings: Any) -> AppMaker:
    """A model of random weights, in a core process of its own or on a thread of this one."""
    kind = InprocEngineClient if in_process else AsyncEngineClient

    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[ASGIApp]:
        if not (folder / "config.json").exists():
            save_model(folder)
        client = await kind.start(tiny_engine(folder, **settings), timeout_s=START_S)
        try:
            yield create_app(Frontend.for_client(client))
        finally:
            await client.shutdown()

    return make
