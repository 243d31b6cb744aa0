"""The registered connectors under ``deaf_connectors:NAME``, without the word that they follow a sleep."""

from __future__ import annotations

from typing import Any

from torpor.connectors import get_connector
from torpor.connectors.registry import KNOWN


def __getattr__(name: str) -> Any:
    if name not in KNOWN:
        raise AttributeError(name)
    return type(name, (get_connector(name),), {"supports_sleep_mode": False})
