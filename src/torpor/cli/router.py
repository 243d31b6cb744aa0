"""``torpor router``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from torpor.cli.console import err, guarded, warn
from torpor.cli.flags import Flag, collect, command, naming_flags
from torpor.cli.open_doors import open_doors_of_router
from torpor.cli.values import parse_bytes
from torpor.router.config import RouterConfig

DOC = """Send requests to a prefill engine, then to a decode engine with its KV.

    torpor router --prefill http://localhost:8001 --decode http://localhost:8002

Clients use the router as they would use one engine. When the prefill engine sleeps or fails, the decode engine prefills.
"""


def _flag(panel: str, field: str, help_text: str, **more: Any) -> Flag:
    return Flag(flag="--" + field.replace("_", "-"), config=RouterConfig, field=field, help=help_text, panel=panel, **more)


ENGINES, ROUTER, WAITS = "Engines", "Router", "Waits"
ROUTER_FLAGS: tuple[Flag, ...] = (
    _flag(
        ENGINES,
        "prefill",
        "A prefill engine; repeatable, or several after one flag. None: decode engines prefill.",
        metavar="URL...",
        many=True,
    ),
    _flag(
        ENGINES, "decode", "A decode engine; repeatable, or several after one flag.", metavar="URL...", many=True, required=True
    ),
    _flag(ENGINES, "policy", "Which engine is asked next."),
    _flag(ROUTER, "host", "Address to listen on. 0.0.0.0 or :: for all; then give the engines an --api-key-file."),
    _flag(ROUTER, "port", "TCP port; 0 takes any free one and prints it."),
    _flag(ROUTER, "max_body_bytes", "Largest request body, such as 32MiB.", parse=parse_bytes, metavar="SIZE"),
    _flag(ROUTER, "max_connections", "Connections to engines at once."),
    _flag(ROUTER, "drain_s", "Seconds that a shutdown waits for running requests."),
    _flag(ROUTER, "access_log", "Log every request."),
    _flag(WAITS, "connect_timeout_s", "Seconds for a connection to an engine."),
    _flag(WAITS, "prefill_timeout_s", "Seconds for a prefill; then the decode engine does it."),
    _flag(WAITS, "first_byte_timeout_s", "Seconds for the first bytes of a stream, or for a whole answer."),
    _flag(WAITS, "read_timeout_s", "Seconds between two pieces of a stream."),
    _flag(WAITS, "health_interval_s", "Seconds between two looks at an engine's /ready."),
    _flag(WAITS, "health_timeout_s", "Seconds for its answer."),
    _flag(WAITS, "silence_timeout_s", "Seconds of failing looks after which requests to an engine are given up."),
    _flag(WAITS, "backoff_s", "Seconds that a failed engine is left alone; doubles with every failure in a row."),
    _flag(WAITS, "max_backoff_s", "At most so many."),
)


def register(app: typer.Typer) -> None:
    app.command("router", help=DOC)(command(guarded(route), ROUTER_FLAGS, doc=DOC))


def route(values: Mapping[str, Any]) -> None:
    from torpor.router import run_router

    with naming_flags(ROUTER_FLAGS):
        config = RouterConfig(**collect(RouterConfig, ROUTER_FLAGS, values))

    prefill = ", ".join(config.prefill) or "the decode engines"

    def on_started(url: str) -> None:
        err.print(f"torpor router at {url}: prefill at {prefill}, decode at {', '.join(config.decode)}", soft_wrap=True)
        if (open_to_all := open_doors_of_router(url)) is not None:
            warn(open_to_all)

    run_router(config, on_started)
