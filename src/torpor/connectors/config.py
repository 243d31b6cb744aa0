from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from torpor.errors import ConfigurationError

MAX_PORT = 65535

KVRole = Literal["producer", "consumer", "both"]
KV_ROLES: tuple[KVRole, ...] = ("producer", "consumer", "both")


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """``connector`` is a registered name (``torpor.connectors.registry.KNOWN``) or ``module:Class``."""

    connector: str
    role: KVRole = "both"
    engine_id: str | None = None  # None: a random one per start
    host: str = "127.0.0.1"  # control channel: where peers find us
    port: int = 0  # 0: any free port. ``ipc`` needs none
    secret_file: str | None = None  # shared secret of the control channel; required when host is not loopback
    withdraw_timeout_s: float = 5.0  # how long a sleep waits for peers to let go
    lease_heartbeat_s: float = 1.0
    handoff_lease_s: float = 30.0  # how long a hand-off waits for its reader; the engine sets it from SchedulerConfig
    extra: dict[str, Any] = field(default_factory=dict)  # the connector's own options; unknown ones are refused by it

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port <= MAX_PORT:
            raise ConfigurationError(f"kv_port is {self.port!r}: must be 0 to {MAX_PORT}", setting="kv_port", value=self.port)
        if self.role not in KV_ROLES:
            raise ConfigurationError(
                f"kv_role {self.role!r} is none of {', '.join(KV_ROLES)}", setting="kv_role", value=self.role
            )
        for setting, least in (("withdraw_timeout_s", "0 or more"), ("lease_heartbeat_s", "more than 0")):
            value = getattr(self, setting)
            if not (math.isfinite(value) and value >= 0) or (value == 0 and least == "more than 0"):
                raise ConfigurationError(f"{setting} is {value}: must be a number, {least}", setting=setting, value=value)
