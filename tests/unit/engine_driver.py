"""Drives an engine core by hand: steps, time and memory transactions happen when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torpor.connectors.base import KVConnector
from torpor.connectors.config import ConnectorConfig
from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.models.config import ModelConfig
from torpor.request import EngineOutput, FinishReason, GenerationRequest, SamplingParams
from torpor.testing.clock import FakeClock
from torpor.testing.engine import (
    FakeConnector,
    FakeConnectorScheduler,
    FakeConnectorWorker,
    FakeWorker,
    ManualBackground,
    fake_core,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


class Driver:
    def __init__(
        self,
        *,
        sleep: SleepConfig | None = None,
        connector: type[KVConnector] | None = None,
        connector_config: ConnectorConfig | None = None,
        worker: FakeWorker | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.background = ManualBackground()
        self.worker = worker or FakeWorker()
        self.states: list[EngineState] = []
        config = EngineConfig(model=ModelConfig(source="fake"), sleep=sleep or SleepConfig(enable_sleep_mode=True))
        try:
            self.core = fake_core(
                config,
                self.worker,
                connector=connector,
                connector_config=connector_config,
                background=self.background,
                clock=self.clock,
                on_state=self.states.append,
            )
        except BaseException:
            self.worker.shutdown()
            raise
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}

    @property
    def state(self) -> EngineState:
        return self.core.state

    @property
    def connector(self) -> FakeConnectorWorker:
        assert isinstance(self.worker.connector, FakeConnectorWorker)
        return self.worker.connector

    @property
    def connector_scheduler(self) -> FakeConnectorScheduler:
        return FakeConnector.schedulers[-1]

    def add(self, request_id: str, max_tokens: int = 8, prompt: Sequence[int] = PROMPT, **transfer: Any) -> None:
        self.core.add(
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling=SamplingParams(max_tokens=max_tokens),
                kv_transfer_params=transfer or None,
            )
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.core.step():
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.request_id not in self.ends, "a request ended twice"
                    self.ends[output.request_id] = output

    def settle(self) -> None:
        """Steps and transactions until nothing is under way."""
        for _ in range(400):
            self.background.run()
            self.step()
            if self.core.wait_s() is None and not self.background.pending:
                return
        raise AssertionError(f"the engine does not come to rest: {self.state}, {self.core.stats().scheduler}")

    def settle_hand_off(self) -> None:
        """Steps until every request has its answer; hand-offs stay."""
        for _ in range(400):
            self.step()
            stats = self.core.stats().scheduler
            if not (stats.running or stats.waiting or stats.loading):
                return
        raise AssertionError(f"requests do not end: {stats}")

    def answer(self, request_id: str, max_tokens: int = 8, prompt: Sequence[int] = PROMPT) -> list[int]:
        """A whole request, alone."""
        self.add(request_id, max_tokens, prompt)
        self.settle()
        assert self.ends[request_id].finish_reason is FinishReason.LENGTH, self.ends.get(request_id)
        return self.tokens[request_id]

    def sleep(self, **fields: Any) -> Future[dict[str, Any]]:
        return self.core.sleep(SleepRequest(**fields))

    def slept(self, **fields: Any) -> dict[str, Any]:
        """A sleep carried to its end."""
        ticket = self.sleep(**fields)
        self.settle()
        return ticket.result(0)

    def woken(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        ticket = self.core.wake_up(tags)
        self.settle()
        return ticket.result(0)

    def mapped(self) -> set[str]:
        return {t.tag for t in self.core.stats().memory.tags if t.resident_bytes}

    def close(self) -> None:
        self.background.inline = True
        self.background.run()
        self.core.shutdown()


def reference(max_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What an engine that never slept says."""
    driver = Driver()
    try:
        return driver.answer("reference", max_tokens, prompt)
    finally:
        driver.close()
