"""The listening socket and the uvicorn loop: bind first, load later, stop within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from torpor.errors import ConfigurationError
from torpor.web.connections import ConnectionLimits, Lobby
from torpor.web.stopping import ENDED_S, UNDRAMATIC, Drain, NobodysRequests, OpenRequests
from torpor.web.streams import stop

log = logging.getLogger("torpor.http")
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not kept waiting. ConfigurationError names the flag."""
    if not 0 <= port <= 65535:  # getaddrinfo takes it modulo 65536
        raise ConfigurationError(f"--port {port} is no TCP port: 0 to 65535", setting="--port", value=port)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, OverflowError, UnicodeError) as e:
        raise ConfigurationError(f"cannot listen on --host {host} --port {port}: {e}", setting="--host", value=host) from e
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as e:
        sock.close()
        raise _bind_error(host, port, e) from e
    return sock


def _bind_error(host: str, port: int, error: Exception) -> ConfigurationError:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return ConfigurationError(f"port {port} on {host} is in use: choose another --port", setting="--port", value=port)
    setting = "--port" if code == errno.EACCES else "--host"
    return ConfigurationError(f"cannot listen on --host {host} --port {port}: {error}", setting=setting, value=port)


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: ``stop()`` is called by whoever owns the signals."""

    def __init__(
        self,
        app: ASGIApp,
        drain_s: float,
        *,
        access_log: bool = False,
        on_started: Callable[[], None] | None = None,
        limits: ConnectionLimits | None = None,
        requests: OpenRequests | None = None,
    ) -> None:
        self._on_started = on_started
        self._drain = Drain(requests or NobodysRequests(), drain_s)
        logging.getLogger("uvicorn.error").addFilter(UNDRAMATIC)
        lobby = Lobby(limits or ConnectionLimits())
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                http=lobby.protocol,  # type: ignore[arg-type]  # a class is expected, anything that makes a protocol works
                ws="none",
                log_config=None,
                access_log=access_log,
                proxy_headers=False,  # the admin door looks at the peer's own address
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=math.ceil(drain_s + 2 * ENDED_S),  # for what ignores that it was ended
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_started is not None:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._drain.run(self._cut))
        try:
            await super().shutdown(sockets)
        finally:
            await stop(draining)
        if self.force_exit:  # then uvicorn has left out what an application does at its end
            await self.lifespan.shutdown()

    def stop(self) -> None:
        """The first call drains, the second ends what is open, the third does not wait for that."""
        if not self.should_exit:
            self._drain.announce(len(self.server_state.tasks))
        elif not self._drain.hurried:
            self._drain.hurried = True
        else:
            self.force_exit = True
        self.should_exit = True

    def _cut(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


@contextlib.contextmanager
def on_signals(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop`` on the loop instead of ending the process."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def serve_until(server: HttpServer, sock: socket.socket, watch: Awaitable[None] | None = None) -> None:
    """Serves until ``server.stop()`` was called or ``watch`` ended; an exception of ``watch`` is raised after the shutdown."""
    serving = asyncio.ensure_future(_serve(server, sock))
    watching = asyncio.ensure_future(watch) if watch is not None else None
    tasks: set[asyncio.Future[None]] = {serving} | ({watching} if watching is not None else set())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.stop()
        await asyncio.wait({serving})
        if watching is not None and not watching.done():
            watching.cancel()
            await asyncio.wait({watching})
    serving.result()
    if watching is not None and not watching.cancelled():
        watching.result()


async def _serve(server: HttpServer, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    try:
        await server.serve(sockets=[sock])
    except OSError as e:
        raise _bind_error(host, port, e) from e
    finally:
        sock.close()
