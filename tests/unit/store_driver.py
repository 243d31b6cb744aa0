"""An engine by hand (``engine_driver``) around a connector that keeps KV itself: its copies are other threads'."""

from __future__ import annotations

import time
from typing import Any

from connector_pairs import WAIT_S
from engine_driver import Driver

from torpor.connectors.base import StoreStats
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.registry import get_connector
from torpor.connectors.store import Store
from torpor.connectors.store_worker import StoreWorker
from torpor.testing.engine import FakeWorker

LONG = [(7 * i + 3) % 251 for i in range(42)]  # ten full blocks of four, and two tokens
OTHER = [(11 * i + 5) % 251 for i in range(42)]


class StoreDriver(Driver):
    def __init__(
        self,
        name: str = "offload",
        *,
        extra: dict[str, Any] | None = None,
        model_id: str = "fake@1",
        engine_id: str = "E",
        worker: FakeWorker | None = None,
        **settings: Any,
    ) -> None:
        config = ConnectorConfig(connector=name, engine_id=engine_id, extra=extra or {}, **settings)
        super().__init__(connector=get_connector(name), connector_config=config, worker=worker or FakeWorker(model_id=model_id))

    @property
    def side(self) -> StoreWorker:
        assert isinstance(self.worker.connector, StoreWorker)
        return self.worker.connector

    @property
    def store(self) -> Store:
        return self.side._store

    @property
    def figures(self) -> StoreStats:
        return self.store.stats()

    def settle(self) -> None:
        """Steps and transactions until nothing is under way, the copies included."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self.background.run()
            self.step()
            if self.core.wait_s() is None and not self.background.pending:
                return
            time.sleep(0.001)
        raise AssertionError(f"the engine does not come to rest: {self.state}, {self.core.stats().scheduler}")

    def cached(self, request_id: str) -> int:
        """Prompt tokens that were not computed."""
        return self.ends[request_id].num_cached_tokens

    def forget(self) -> None:
        """The KV cache is as after a sleep: empty."""
        self.slept(level=1)
        self.woken()


def told(prompt: list[int], max_tokens: int = 8) -> list[int]:
    """What an engine says that has no connector and never slept."""
    driver = Driver()
    try:
        return driver.answer("reference", max_tokens, prompt)
    finally:
        driver.close()
