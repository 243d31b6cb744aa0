"""Options made from config dataclasses: type and default are the field's own, so the command line cannot drift from it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.models import ArgumentInfo

from torpor.cli.console import size
from torpor.cli.values import parse_bytes
from torpor.errors import ConfigurationError, DeviceMemoryError

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """``--flag`` sets ``config.field``. ``negates``: a switch that makes it false. ``parse``: text to the field's type."""

    flag: str
    config: type
    field: str
    help: str
    panel: str
    parse: Callable[[str], Any] | None = None
    negates: bool = False
    metavar: str | None = None
    choices: tuple[str, ...] = ()  # for a field that takes any text
    required: bool = False
    many: bool = False  # repeatable, and several values after one flag are one URL list

    @property
    def name(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def default(self) -> Any:
        field = next(f for f in dataclasses.fields(self.config) if f.name == self.field)
        if field.default is not dataclasses.MISSING:
            return field.default
        return field.default_factory() if field.default_factory is not dataclasses.MISSING else None

    def parameter(self) -> inspect.Parameter:
        # What is neither on nor off by default can be turned on and off.
        names = [f"{self.flag}/--no-{self.flag[2:]}" if self._type() == (bool | None) else self.flag]
        option = typer.Option(
            *names,
            help=self.help,
            rich_help_panel=self.panel,
            parser=self.parse,
            metavar=self.metavar,
            show_default=self._shown_default(),
        )
        default: Any = False if self.negates else self.default
        if self.many:
            default = list(default or ())
        if self.required:
            default = inspect.Parameter.empty
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=default, annotation=Annotated[self._type(), option])

    def _shown_default(self) -> bool | str:
        if self.parse is parse_bytes and self.default is not None:
            return size(self.default)
        return self.default is not None and not self.negates

    def _type(self) -> Any:
        if self.many:
            return list[str]
        if self.negates:
            return bool
        if self.choices:
            return Literal[self.choices]
        if self.parse is not None:
            return str | None
        return get_type_hints(self.config)[self.field]


def collect(config: type, flags: Sequence[Flag], values: Values) -> dict[str, Any]:
    """Keyword arguments for ``config`` from the values of its flags."""
    found = {}
    for flag in flags:
        if flag.config is config:
            value = values[flag.name]
            found[flag.field] = not value if flag.negates else tuple(value) if flag.many else value
    return found


@contextmanager
def naming_flags(flags: Sequence[Flag], others: Mapping[str, str] | None = None) -> Iterator[None]:
    """An error about a setting, by the name of its field or of its flag, also names the flag that sets it. ``others``: flags of
    settings that are no fields."""
    try:
        yield
    except (ConfigurationError, DeviceMemoryError) as error:
        setting = error.fields.get("setting")
        fitting = sorted((f for f in flags if setting in (f.name, f.field)), key=lambda f: f.name != setting)
        named = fitting[0].flag if fitting else (others or {}).get(str(setting))
        if named is None or named in error.message:
            raise
        raise type(error)(f"{error.message} ({named})", **{**error.fields, "setting": named}) from error


def command(
    run: Callable[..., None], flags: Sequence[Flag], extra: Sequence[inspect.Parameter] = (), *, doc: str
) -> Callable[..., None]:
    """A function whose signature Typer can read: the arguments of ``extra``, the flags, the rest. ``run`` gets one mapping."""

    def call(**values: Any) -> None:
        run(values)

    arguments = [p for p in extra if is_argument(p)]
    parameters = [*arguments, *(f.parameter() for f in flags), *(p for p in extra if p not in arguments)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__doc__ = doc
    return call


def is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(info, ArgumentInfo) for info in getattr(parameter.annotation, "__metadata__", ()))


def keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
