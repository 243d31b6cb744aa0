"""From a config to a server that runs until it is told to stop or its engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from torpor.engine.base import EngineClient, EngineState
from torpor.engine.frontend import Frontend
from torpor.errors import EngineDeadError
from torpor.server.config import ServerConfig
from torpor.web.serve import HttpServer, bind, on_signals, serve_until, url_of
from torpor.web.streams import stop

WATCH_INTERVAL_S = 0.5
SHUTDOWN_S = 30.0
FROZEN = (EngineState.ASLEEP, EngineState.PAUSED, EngineState.DEAD)

Started = Callable[[Frontend, str], None]


@dataclass(frozen=True)
class EngineRequests:
    """What a shutdown does about requests that are open (``web.stopping.OpenRequests``)."""

    client: EngineClient

    def frozen(self) -> str | None:
        """A server that stops takes no call that would wake or resume its engine."""
        state = self.client.state
        return f"the engine is {state.value}" if state in FROZEN else None

    def end(self) -> None:
        self.client.end_requests("the server is stopping: the request was ended")


def run_server(
    config: ServerConfig, start: Callable[[], Awaitable[Frontend]], on_started: Started | None = None
) -> signal.Signals | None:
    """Blocks until SIGTERM or SIGINT; then running requests get ``drain_s`` and the engine is shut down. For the main thread.
    The signal if it came before requests were served, else None.

    The port is bound before ``start`` loads the model: ConfigurationError names --port when it is taken. ``on_started`` gets the
    front end and the URL once requests are accepted. EngineDeadError when the engine dies.
    """
    sock = bind(config.host, config.port)
    try:
        return asyncio.run(_run(config, sock, start, on_started))
    finally:
        sock.close()


async def _run(
    config: ServerConfig, sock: socket.socket, start: Callable[[], Awaitable[Frontend]], on_started: Started | None
) -> signal.Signals | None:
    stopping = asyncio.Event()
    signals: list[signal.Signals] = []
    started = on_started or (lambda frontend, url: None)
    server: HttpServer | None = None

    def on_stop(number: signal.Signals) -> None:
        signals.append(number)
        stopping.set()
        if server is not None:
            server.stop()

    with on_signals(on_stop):
        frontend = await _start_unless(stopping, start)
        if frontend is None:
            return signals[0]
        try:
            from torpor.server.app import create_app  # the web framework: not in the way of a core that loads

            url = url_of(sock)
            app = create_app(frontend, config)
            server = HttpServer(
                app,
                config.drain_s,
                access_log=config.access_log,
                on_started=lambda: started(frontend, url),
                requests=EngineRequests(frontend.client),
            )
            if stopping.is_set():
                return signals[0]
            await serve_until(server, sock, watch_engine(frontend, config.hang_timeout_s))
            return None
        finally:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(frontend.client.shutdown(), SHUTDOWN_S)


async def _start_unless(stopping: asyncio.Event, start: Callable[[], Awaitable[Frontend]]) -> Frontend | None:
    """The started front end, or None when a signal came first: the load is cancelled then."""
    loading = asyncio.ensure_future(_awaited(start))
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({loading, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return loading.result() if loading.done() else None
    finally:
        await stop(waiting)
        await stop(loading)


async def _awaited(start: Callable[[], Awaitable[Frontend]]) -> Frontend:
    return await start()


async def watch_engine(frontend: Frontend, hang_timeout_s: float) -> None:
    """Ends only by raising EngineDeadError: the core is gone, or hangs for so long."""
    while frontend.client.state is not EngineState.DEAD:
        silent_s = frontend.client.silent_s()
        if silent_s > hang_timeout_s:
            await frontend.client.shutdown()  # ends what is open with an error
            raise EngineDeadError(f"the engine core has neither answered nor computed for {silent_s:.0f} s: it hangs")
        await asyncio.sleep(WATCH_INTERVAL_S)
    await frontend.client.check_health()
    raise EngineDeadError("the engine core is gone")
