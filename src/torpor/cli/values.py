"""Parsers of option values. A wrong one is a usage error that shows what would be right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer

from torpor.cli.console import warn
from torpor.errors import ConfigurationError

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
MIN_SECRET_CHARS = 8


def parse_bytes(text: str) -> int:
    """``512MiB``, ``2GiB``, ``1.5GB`` or a plain number of bytes."""
    match = SIZE.fullmatch(str(text).strip())
    unit = UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 512MiB, 2GiB, 1.5GB or a number of bytes")
    nbytes = float(match.group(1)) * unit
    if nbytes < 1:
        raise typer.BadParameter(f"{text!r} is less than one byte")
    return round(nbytes)


def read_secret(path: str) -> str:
    """The first line of a file; its content stays out of the process list. Warns of a file that others may read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise typer.BadParameter(f"cannot read {path!r}: {e}") from e
    secret = lines[0].strip() if lines else ""
    if len(secret) < MIN_SECRET_CHARS or not secret.isascii() or not secret.isprintable():
        raise typer.BadParameter(
            f"{path!r} must hold a token of at least {MIN_SECRET_CHARS} printable ASCII characters in its first line"
        )
    warn_if_exposed(path)
    return secret


def warn_if_exposed(path: str) -> None:
    from torpor.connectors.auth import exposure  # with numpy: not for commands without a secret

    exposed = exposure(path)
    if exposed is not None:
        warn(exposed)


def split_option(flag: str, text: str, form: str = "KEY=VALUE") -> tuple[str, str]:
    """Both sides of ``=``; ConfigurationError for anything else, which names the ``form`` that the help shows."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"{flag} {text!r} is not {form}", setting=flag, value=text)
    return key, value


def typed_option(flag: str, text: str) -> tuple[str, Any]:
    """``KEY=VALUE``. A value that is JSON (a number, true, a list, an object) is that, a size (``4GiB``) its bytes, and any other
    text."""
    key, value = split_option(flag, text)
    try:
        return key, json.loads(value)
    except ValueError:
        size = SIZE.fullmatch(value)
        return key, parse_bytes(value) if size and size.group(2).upper() in UNITS else value
