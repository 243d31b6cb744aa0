"""The command tree. A command's module is imported when the command is used, since an engine's brings in torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from torpor import __version__
from torpor.cli.console import options, out

HELP = "LLM serving whose device memory can sleep: physical pages go and come back, addresses stay."


@dataclass(frozen=True)
class Command:
    """``module`` has ``register(app)``, which adds the command; ``summary`` is the first line of its help."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("serve", "torpor.cli.serve", "Serve MODEL with an OpenAI-compatible API."),
    Command("router", "torpor.cli.router", "Send requests to a prefill engine, then to a decode engine with its KV."),
    Command("demo", "torpor.cli.demo", "Show on this machine that a prefill/decode pair sleeps, wakes and answers as before."),
    Command("memory", "torpor.cli.admin", "Show a server's pools: what is resident, what is in host images, who waits."),
    Command("sleep", "torpor.cli.admin", "Give a server's device memory back."),
    Command("wake", "torpor.cli.admin", "Bring a sleeping server back to the same addresses."),
    Command("pause", "torpor.cli.admin", "Stop serving without giving memory back."),
    Command("resume", "torpor.cli.admin", "Serve again after a pause."),
    Command(
        "check-connector", "torpor.cli.check_connector", "Check a KV connector: does it follow a sleep, whatever goes wrong."
    ),
    Command("bench", "torpor.cli.bench", "Measure time to first token, time per token and throughput of a server."),
)
# Options that take several values after one flag, as in `--prefill URL URL --decode URL`.
SPREAD = {"router": ("--prefill", "--decode")}


def known_commands() -> tuple[Command, ...]:
    return tuple(c for c in COMMANDS if importlib.util.find_spec(c.module) is not None)


def build_app(load: Collection[str] | None = None) -> typer.Typer:
    """All commands; those not in ``load`` (None: all are) only with their name and summary, for the list."""
    app = typer.Typer(
        help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    app.callback()(_root)
    loaded: set[str] = set()
    for command in known_commands():
        if load is not None and command.name not in load:
            app.command(command.name, help=command.summary)(_not_loaded)
        elif command.module not in loaded:
            importlib.import_module(command.module).register(app)
            loaded.add(command.module)
    app.command("version", help="Print the version.")(_version)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """The ``torpor`` command. Ends with SystemExit: 0, 1 for a failure, 2 for a wrong option or setting."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    names = {c.name for c in known_commands()}
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    module = next((c.module for c in COMMANDS if c.name == chosen), None)
    load = {c.name for c in COMMANDS if c.module == module} if chosen in names else set()
    build_app(load)(args=spread(arguments, SPREAD.get(chosen or "", ())), prog_name="torpor")


def spread(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """``--flag a b`` as ``--flag a --flag b``."""
    found: list[str] = []
    current: str | None = None
    for argument in arguments:
        if argument.startswith("-"):
            current = argument if argument in flags else None
        elif current is not None and found[-1] != current:
            found.append(current)
        found.append(argument)
    return found


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=lambda on: _print_version(on))
    ] = False,
) -> None:
    options.debug = debug


def _print_version(on: bool) -> None:
    if on:
        _version()
        raise typer.Exit


def _version() -> None:
    out.print(f"torpor {__version__}")


def _not_loaded() -> None:
    raise AssertionError("main loads the command that is run")
