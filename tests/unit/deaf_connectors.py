"""The registered connectors under ``deaf_connectors:NAME``, without the word that they follow a sleep."""

from __future__ import annotations

from typing import Any

from torpor.connectors import ConnectorConfig, KVConnector, get_connector
from torpor.connectors.registry import KNOWN


def __getattr__(name: str) -> Any:
    if name not in KNOWN:
        raise AttributeError(name)
    kind = get_connector(name)

    def configured(cls: type[KVConnector], config: ConnectorConfig) -> type[KVConnector]:
        return type(name, (kind.configured(config),), {"supports_sleep_mode": False})

    return type(name, (kind,), {"supports_sleep_mode": False, "configured": classmethod(configured)})
