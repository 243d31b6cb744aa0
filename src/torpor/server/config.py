from __future__ import annotations

from dataclasses import dataclass

from torpor.web.numbers import check_above_zero, check_finite


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    admin_token: str | None = None  # None: admin routes answer loopback clients only
    api_key: str | None = None  # None: /v1 is open
    max_body_bytes: int = 32 << 20
    drain_s: float = 30.0  # how long a shutdown waits for running requests before it aborts them
    stats_timeout_s: float = 2.0  # an engine busy with a sleep answers stats with the last ones known
    health_timeout_s: float = 5.0  # a core that neither answers nor computes for so long is unresponsive: not ready, no requests
    hang_timeout_s: float = 60.0  # for so long, and it counts as dead: open requests end with an error, the server exits
    access_log: bool = False

    def __post_init__(self) -> None:
        check_finite(self, ("drain_s",))
        check_above_zero(self, ("max_body_bytes", "stats_timeout_s", "health_timeout_s", "hang_timeout_s"))
