"""Models: definitions from transformers, weights in pools, attention over paged KV.

Everything but the configuration is imported at first use: transformers takes seconds that whoever only configures can do without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torpor.models.config import ModelConfig

if TYPE_CHECKING:
    from torpor.models.loader import LoadedModel, load_model
    from torpor.models.source import ResolvedModel, resolve_model
    from torpor.models.update import resolve_update

__all__ = ["LoadedModel", "ModelConfig", "ResolvedModel", "load_model", "resolve_model", "resolve_update"]

_LAZY = {
    "LoadedModel": "loader",
    "load_model": "loader",
    "ResolvedModel": "source",
    "resolve_model": "source",
    "resolve_update": "update",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
