"""A connector in the engine: which one, may it sleep, and its subscription to the mapping of the KV cache."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from torpor.connectors.base import KVConnector, KVConnectorWorker
from torpor.connectors.config import ConnectorConfig
from torpor.engine.config import SleepConfig
from torpor.errors import ConnectorError

if TYPE_CHECKING:
    from torpor.memory import Memory


def choose_connector(
    config: ConnectorConfig, sleep: SleepConfig, kind: type[KVConnector] | None = None
) -> tuple[type[KVConnector], ConnectorConfig]:
    """The connector's class (``kind``, or the one of that name), and its configuration with an engine id, the same for both
    sides. Refuses at start-up what could not follow a sleep (E4): ConnectorError, before anything is loaded."""
    if kind is None:
        from torpor.connectors import get_connector  # transports are imported only where one is wanted

        kind = get_connector(config.connector)
    kind = kind.configured(config)
    if sleep.enable_sleep_mode and not kind.supports_sleep_mode:
        raise refusal(config.connector, "cannot start with enable_sleep_mode")
    return kind, dataclasses.replace(config, engine_id=config.engine_id or secrets.token_hex(8))


def refusal(name: str, what: str) -> ConnectorError:
    return ConnectorError(
        f"connector {name!r} does not support sleep mode (it would keep addressing unmapped memory): {what}; "
        "use a connector that does, or start with enable_sleep_mode=False and do not unmap the KV cache",
        connector=name,
        setting="enable_sleep_mode",
    )


class ConnectorSubscription:
    """Registered hooks of one connector. ``close`` is idempotent: after it the connector is never called by the memory layer."""

    def __init__(self, unregister: Callable[[], None] | None) -> None:
        self._unregister = unregister

    @property
    def active(self) -> bool:
        return self._unregister is not None

    def close(self) -> None:
        unregister, self._unregister = self._unregister, None
        if unregister is not None:
            unregister()


def subscribe(kind: type[KVConnector], worker_side: KVConnectorWorker, memory: Memory, name: str) -> ConnectorSubscription:
    """Bind the connector to the mapping of ``kv_cache`` exactly when its class declares support (E5)."""
    if not kind.supports_sleep_mode:
        return ConnectorSubscription(None)
    unregister = memory.register_tag_hooks(
        "kv_cache",
        before_unmap=worker_side.release_kv_caches,
        after_map=worker_side.restore_kv_caches,
        name=f"connector {name}",
    )
    return ConnectorSubscription(unregister)
