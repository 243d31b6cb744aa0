"""The OpenAI-compatible HTTP server: ``create_app`` for an application, ``run_server`` for a process.

Both are imported at first use: the web framework takes most of a second that whoever only configures can do without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torpor.server.config import ServerConfig

if TYPE_CHECKING:
    from torpor.server.app import create_app
    from torpor.server.run import run_server

__all__ = ["ServerConfig", "create_app", "run_server"]

_LAZY = {"create_app": "app", "run_server": "run"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
