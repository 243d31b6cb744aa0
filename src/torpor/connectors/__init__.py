"""KV connectors: how one engine's KV cache reaches another's. ``base`` is the contract, ``get_connector`` finds the ones there
are."""

from torpor.connectors.base import (
    ConnectorMetadata,
    ConnectorStats,
    Finished,
    HandOff,
    KVConnector,
    KVConnectorScheduler,
    KVConnectorWorker,
    LoadRequest,
    PeerStats,
    StoreStats,
)
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.registry import get_connector

__all__ = [
    "ConnectorConfig",
    "ConnectorMetadata",
    "ConnectorStats",
    "Finished",
    "HandOff",
    "KVConnector",
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "LoadRequest",
    "PeerStats",
    "StoreStats",
    "get_connector",
]
