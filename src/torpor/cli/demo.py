"""``torpor demo``: the main job on this machine, with real engines and a real model."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from torpor.cli.console import guarded, out
from torpor.demo import DemoConfig, run_demo, run_unfollowed
from torpor.errors import ConfigurationError
from torpor.memory.config import DRIVERS

_DEFAULT = DemoConfig()
KNOWN = ("ipc", "nixl")


def register(app: typer.Typer) -> None:
    app.command("demo")(guarded(demo))


def demo(
    connector: Annotated[
        list[str] | None, typer.Option(help=f"How D reads P's KV cache: {' or '.join(KNOWN)}. Repeatable; default: both.")
    ] = None,
    unfollowed: Annotated[
        bool, typer.Option("--unfollowed", help="Show the fault instead: registrations that do not follow the mapping.")
    ] = False,
    cycles: Annotated[int, typer.Option(help="Sleeps of each kind at level 1.", min=1)] = _DEFAULT.cycles,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = _DEFAULT.max_tokens,
    model: Annotated[
        str,
        typer.Option(
            help="A folder, a .gguf file, builtin:smollm2-135m, random: a small one, made on the spot, or random:qwen3-8b."
        ),
    ] = _DEFAULT.model,
    memory_driver: Annotated[
        Literal[DRIVERS],  # type: ignore[valid-type]
        typer.Option(help="Where the engines' memory is, as for serve. With two GPUs each engine takes one."),
    ] = _DEFAULT.memory_driver,
    json: Annotated[Path | None, typer.Option(help="Also write the results to this file.")] = None,
) -> None:
    """Starts a prefill engine, a decode engine and a router, asks eight questions, puts the engines to sleep in turn, wakes them
    and asks again: every answer must be the same to the byte and every page must have come back. Ends with PASS or FAIL."""
    chosen = tuple(connector or _DEFAULT.connectors)
    for name in chosen:
        if name not in KNOWN:
            raise ConfigurationError(
                f"connector {name!r} is not known; use one of {', '.join(KNOWN)}", setting="--connector", value=name
            )
    if json is not None:
        check_results_file(json, unfollowed)
    config = DemoConfig(
        connectors=chosen,
        cycles=cycles,
        max_tokens=max_tokens,
        model=model,
        memory_driver=memory_driver,
        results_file=json,
    )
    with sigterm_ends_all():
        passed = run_unfollowed(config, out) if unfollowed else run_demo(config, out)
    if not passed:
        raise typer.Exit(1)


@contextlib.contextmanager
def sigterm_ends_all() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: without a handler its engines would outlive it, and keep their memory."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_results_file(path: Path, unfollowed: bool) -> None:
    """Before the demo's minutes, not after them."""
    if unfollowed:
        raise ConfigurationError("--unfollowed has no results to write: leave out --json", setting="--json", value=str(path))
    try:
        path.open("ab").close()
    except OSError as e:
        raise ConfigurationError(f"cannot write --json {path}: {e}", setting="--json", value=str(path)) from e
