"""The ``torpor`` command."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """See ``torpor.cli.app.main``. Ctrl-C while a command's modules are imported ends it like any other moment's: silently."""
    try:
        from torpor.cli.app import main as run

        run(argv)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


__all__ = ["main"]
