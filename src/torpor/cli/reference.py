"""The command line's reference as Markdown: what ``--help`` says, for reading on a page."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from torpor.cli.app import HELP, build_app, known_commands

HEADER = f"""# The command line

{HELP}

Written by `scripts/gen-cli-docs`; `torpor COMMAND --help` says the same. `torpor --debug COMMAND` shows tracebacks. A wrong
option or setting ends with exit status 2, a failure with 1. Results go to standard output, everything else to standard error.
"""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a command, read from its signature."""

    name: str
    kind: Any  # its type
    info: OptionInfo | ArgumentInfo
    default: Any

    @property
    def is_argument(self) -> bool:
        return isinstance(self.info, ArgumentInfo)

    @property
    def is_switch(self) -> bool:
        return self.kind in (bool, bool | None)

    @property
    def panel(self) -> str:
        return self.info.rich_help_panel or "Options"

    @property
    def spelling(self) -> str:
        """``--flag VALUE``."""
        flag = self.name.replace("_", "-")
        names = self._declared or ("--" + flag + (f"/--no-{flag}" if self.kind == (bool | None) else ""),)
        return ", ".join(names) if self.is_switch else f"{', '.join(names)} {self.info.metavar or value_name(self.kind)}"

    @property
    def _declared(self) -> tuple[str, ...]:
        """Inside ``Annotated`` the first of the names lies where a default would be: Typer moves it when the command runs."""
        names = (self.info.default, *(self.info.param_decls or ()))
        return tuple(name for name in names if isinstance(name, str) and name.startswith("-"))

    @property
    def shown_default(self) -> str:
        if self.default is inspect.Parameter.empty:
            return "required"
        if self.is_switch or self.default in (None, [], ()) or not self.info.show_default:
            return ""
        return self.info.show_default if isinstance(self.info.show_default, str) else f"`{self.default}`"


def cli_reference() -> str:
    """The whole of docs/cli.md."""
    commands = {c.name: c for c in build_app().registered_commands}
    names = [*(c.name for c in known_commands()), "version"]
    return HEADER + "".join(_command(name, commands[name]) for name in names)


def _command(name: str, command: Any) -> str:
    parameters = parameters_of(command.callback)
    arguments = [p.info.metavar or p.name.upper() for p in parameters if p.is_argument]
    options = [p for p in parameters if not p.is_argument]
    usage = " ".join(["torpor", name, *arguments, *(["[OPTIONS]"] if options else [])])
    parts = [f"\n## {name}\n\n{inspect.cleandoc(command.help or command.callback.__doc__ or '')}\n\n```\n{usage}\n```\n"]
    for panel in dict.fromkeys(p.panel for p in options):
        parts.append(f"\n| {panel} | | default |\n| --- | --- | --- |\n")
        parts += [_row(p) for p in options if p.panel == panel]
    return "".join(parts)


def parameters_of(callback: Callable[..., Any]) -> list[Parameter]:
    hints = get_type_hints(callback, include_extras=True)
    found = []
    for parameter in inspect.signature(callback).parameters.values():
        kind, *extras = get_args(hints[parameter.name])
        info = next(e for e in extras if isinstance(e, (OptionInfo, ArgumentInfo)))
        found.append(Parameter(parameter.name, kind, info, parameter.default))
    return found


def _row(option: Parameter) -> str:
    spelling = option.spelling.replace("|", "\\|")
    help_text = (option.info.help or "").replace("|", "\\|")
    return f"| `{spelling}` | {help_text} | {option.shown_default} |\n"


def value_name(kind: Any) -> str:
    """``X | None`` is X, a list its items; the values of a Literal are spelt out."""
    if get_origin(kind) is Literal:
        return "|".join(str(v) for v in get_args(kind))
    inner = [k for k in get_args(kind) if k is not type(None)]
    if inner:
        return value_name(inner[0])
    return {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "Path": "FILE"}[kind.__name__]
