"""How the command line speaks: results on standard output, everything else on standard error, errors as one line."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from torpor.errors import ConfigurationError, TorporError

P = ParamSpec("P")
R = TypeVar("R")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2


@dataclass
class Options:
    """What ``torpor --debug COMMAND`` sets for every command."""

    debug: bool = False


options = Options()


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """One line for an error and an exit status: 2 when a setting is wrong, 1 for the rest. With --debug the traceback too."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, SystemExit, KeyboardInterrupt):
            raise
        except Exception as error:
            raise typer.Exit(report(error)) from error

    return run


def report(error: Exception) -> int:
    """Prints ``error``; the exit status for it."""
    if options.debug:
        err.print_exception()
    if isinstance(error, TorporError):
        err.print(f"[bold red]error:[/bold red] {escape(' '.join(str(error).split()))}", soft_wrap=True)
        return EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_FAILED
    err.print(
        f"[bold red]internal error:[/bold red] {type(error).__name__}: {escape(str(error))} (torpor --debug shows where)",
        soft_wrap=True,
    )
    return EXIT_FAILED


def warn(message: str) -> None:
    """One line about what works, and should not stay as it is."""
    err.print(f"[bold yellow]warning:[/bold yellow] {escape(message)}", soft_wrap=True)


class Progress:
    """Says what is being waited for: a spinner on a terminal, else a line per phase. A context manager; call it to report."""

    LINE_EVERY_S = 5.0  # where there is no terminal

    def __init__(self, first: str, console: Console = err) -> None:
        self._console = console
        self._first = first
        self._phase = ""
        self._told = 0.0
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = self._console.status(escape(self._first))
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, phase: str, fraction: float) -> None:
        """``fraction`` is of this phase, 0 to 1."""
        text = f"{phase} {fraction:.0%}" if 0 < fraction < 1 else phase
        if self._status is not None:
            self._status.update(escape(text))
        elif phase != self._phase or time.monotonic() - self._told > self.LINE_EVERY_S:
            self._console.print(escape(text))
            self._told = time.monotonic()
        self._phase = phase


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
