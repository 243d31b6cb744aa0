"""The ``torpor`` command."""

from torpor.cli.app import build_app, main

__all__ = ["build_app", "main"]
