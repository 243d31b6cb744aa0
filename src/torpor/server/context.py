"""What every route of one app shares."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torpor.engine.base import EngineClient, EngineState
from torpor.engine.frontend import Frontend
from torpor.errors import TorporError
from torpor.server.config import ServerConfig
from torpor.server.metrics import Metrics
from torpor.web.errors import ApiError


@dataclass
class ServerContext:
    frontend: Frontend
    config: ServerConfig
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))
    _last_stats: dict[str, Any] | None = None

    @property
    def client(self) -> EngineClient:
        return self.frontend.client

    @property
    def model_names(self) -> Sequence[str]:
        return (self.frontend.info.model_name,)

    def check_model(self, name: str | None) -> str:
        """The served name; 404 in OpenAI's words for any other."""
        served = self.frontend.info.model_name
        if name is not None and name not in self.model_names:
            message = f"the model {name!r} does not exist here; this server serves {served!r}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return served

    async def require_responsive(self) -> None:
        """``check_responsive`` for routes: a coroutine, so that it runs on the event loop."""
        self.check_responsive()

    def check_responsive(self) -> None:
        """503 for a core that hangs: a request would wait for it in vain."""
        silent_s = self.client.silent_s()
        if silent_s > self.config.health_timeout_s:
            message = f"the engine has not answered for {silent_s:.0f} s (its process is stopped, or hangs)"
            raise ApiError(503, message, code="engine_unresponsive", headers={"Retry-After": "1"})

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{secrets.token_hex(12)}"

    async def fresh_stats(self) -> dict[str, Any]:
        """The engine's stats; after ``stats_timeout_s`` the last ones known, marked ``stale``: a sleep may keep the core busy."""
        try:
            stats = await asyncio.wait_for(self.client.stats(), self.config.stats_timeout_s)
        except asyncio.TimeoutError:
            return {**(self._last_stats or {}), "state": self.client.state.value, "stale": True}
        self._last_stats = stats
        return stats

    async def stats_or_none(self) -> dict[str, Any] | None:
        try:
            return await self.fresh_stats()
        except TorporError:
            return None

    @property
    def state(self) -> EngineState:
        return self.client.state
