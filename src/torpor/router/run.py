from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from torpor.router.app import Router, create_app
from torpor.router.config import RouterConfig
from torpor.web.serve import HttpServer, bind, on_signals, serve_until, url_of


@dataclass(frozen=True)
class RouterRequests:
    """What a shutdown does about requests that are open (``web.stopping.OpenRequests``)."""

    router: Router

    def frozen(self) -> str | None:
        return None

    def end(self) -> None:
        for backend in self.router.backends:
            backend.give_up("the router is stopping")


def run_router(config: RouterConfig, on_started: Callable[[str], None] | None = None) -> None:
    """Blocks until SIGTERM or SIGINT; then running requests get ``drain_s``. For the main thread. ``on_started`` gets the URL."""
    sock = bind(config.host, config.port)
    try:
        asyncio.run(_run(config, sock, on_started or (lambda url: None)))
    finally:
        sock.close()


async def _run(config: RouterConfig, sock: socket.socket, on_started: Callable[[str], None]) -> None:
    url = url_of(sock)
    app = create_app(config)
    server = HttpServer(
        app,
        config.drain_s,
        access_log=config.access_log,
        on_started=lambda: on_started(url),
        requests=RouterRequests(app.state.router),
    )
    with on_signals(lambda number: server.stop()):
        await serve_until(server, sock)
