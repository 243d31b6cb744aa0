"""Prometheus metrics in a registry of the server's own: what requests met here, and the engine's stats at a scrape."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect

from torpor.engine.base import EngineState
from torpor.engine.frontend import TextDelta
from torpor.errors import TorporError
from torpor.server.engine_metrics import EngineCollector
from torpor.web.errors import status_of

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = EngineCollector()
        self.registry.register(self._engine)
        r = self.registry
        self.requests = Counter("torpor_requests", "Requests by route and how they ended.", ["route", "outcome"], registry=r)
        self.running = Gauge("torpor_requests_open", "Requests being answered.", ["route"], registry=r)
        self.prompt_tokens = Counter("torpor_prompt_tokens", "Prompt tokens of answered requests.", registry=r)
        self.cached_tokens = Counter(
            "torpor_cached_prompt_tokens", "Of these, taken from the prefix cache or a peer.", registry=r
        )
        self.generated_tokens = Counter("torpor_generation_tokens", "Tokens generated.", registry=r)
        self.first_token = Histogram(
            "torpor_time_to_first_token_seconds",
            "From the request to its first token.",
            ["route"],
            buckets=FIRST_TOKEN_S,
            registry=r,
        )
        self.between_tokens = Histogram(
            "torpor_inter_token_seconds", "Between two deltas of one request.", ["route"], buckets=BETWEEN_TOKENS_S, registry=r
        )
        self.duration = Histogram(
            "torpor_request_seconds", "From the request to its end.", ["route"], buckets=REQUEST_S, registry=r
        )
        self.operations = Counter("torpor_operations", "Admin operations by outcome.", ["operation", "outcome"], registry=r)
        self.operation_seconds = Gauge(
            "torpor_last_operation_seconds", "Seconds the last finished admin operation took.", ["operation"], registry=r
        )
        Gauge("torpor_model_info", "The served model.", ["model"], registry=r).labels(model_name).set(1)

    def meter(self, route: str, choices_per_prompt: int) -> RequestMeter:
        return RequestMeter(self, route, choices_per_prompt)

    def operation(self, name: str) -> OperationMeter:
        return OperationMeter(self, name)

    def render(self, state: EngineState, stats: dict[str, Any] | None) -> bytes:
        """The text format. ``stats`` None: the engine did not answer, its own figures are left out."""
        self._engine.set(state, stats)
        return generate_latest(self.registry)


class RequestMeter:
    """Follows one request; entering and leaving it is its start and end."""

    def __init__(self, metrics: Metrics, route: str, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._metrics = metrics
        self._route = route
        self._started = time.monotonic()
        self._last: float | None = None
        self._begun: set[int] = set()  # prompts that have a first token
        self._outcome = "unfinished"

    def __enter__(self) -> RequestMeter:
        self._metrics.running.labels(self._route).inc()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        m = self._metrics
        m.running.labels(self._route).dec()
        m.requests.labels(self._route, self._outcome if error is None else outcome_of(error)).inc()
        m.duration.labels(self._route).observe(time.monotonic() - self._started)

    def observe(self, delta: TextDelta) -> None:
        m, now = self._metrics, time.monotonic()
        if delta.token_ids:
            if self._last is None:
                m.first_token.labels(self._route).observe(now - self._started)
            else:
                m.between_tokens.labels(self._route).observe(now - self._last)
            self._last = now
            m.generated_tokens.inc(len(delta.token_ids))
            self._count_prompt(delta)
        if delta.finish_reason is not None:
            self._outcome = delta.finish_reason.value

    def _count_prompt(self, delta: TextDelta) -> None:
        prompt = delta.index // self._choices_per_prompt
        if prompt not in self._begun:
            self._begun.add(prompt)
            self._metrics.prompt_tokens.inc(delta.num_prompt_tokens)
            self._metrics.cached_tokens.inc(delta.num_cached_tokens)


class OperationMeter:
    """Follows one admin operation."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics = metrics
        self._name = name
        self._started = time.monotonic()

    def __enter__(self) -> OperationMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._metrics.operations.labels(self._name, "done" if error is None else outcome_of(error)).inc()
        if error is None:
            self._metrics.operation_seconds.labels(self._name).set(time.monotonic() - self._started)


def outcome_of(error: BaseException) -> str:
    """A label of few values: the error's code, or that the client left."""
    if isinstance(error, TorporError):
        return status_of(error).code
    if isinstance(error, (GeneratorExit, ClientDisconnect)) or type(error).__name__ == "CancelledError":
        return "disconnected"
    return "internal_error"
