from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from torpor.router.app import create_app
from torpor.router.config import RouterConfig
from torpor.web.serve import HttpServer, bind, on_signals, serve_until, url_of


def run_router(config: RouterConfig, on_started: Callable[[str], None] | None = None) -> None:
    """Blocks until SIGTERM or SIGINT; then running requests get ``drain_s``. For the main thread. ``on_started`` gets the URL."""
    sock = bind(config.host, config.port)
    try:
        asyncio.run(_run(config, sock, on_started or (lambda url: None)))
    finally:
        sock.close()


async def _run(config: RouterConfig, sock: socket.socket, on_started: Callable[[str], None]) -> None:
    url = url_of(sock)
    server = HttpServer(create_app(config), config.drain_s, access_log=config.access_log, on_started=lambda: on_started(url))
    with on_signals(lambda number: server.stop()):
        await serve_until(server, sock)
