"""The router's Prometheus metrics, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torpor.router.backends import Backend, BackendState

ANSWER_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class RouterMetrics:
    def __init__(self, backends: Sequence[Backend]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(BackendCollector(backends))
        self._paths = Counter(
            "torpor_router_paths",
            "Requests by path: split, or why the decode engine prefilled.",
            ["path"],
            registry=self.registry,
        )
        self._answers = Counter(
            "torpor_router_answers", "Answers by route and status.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "torpor_router_answer_seconds",
            "From the request to its status and first bytes.",
            ["route"],
            buckets=ANSWER_S,
            registry=self.registry,
        )

    def path(self, path: str) -> None:
        self._paths.labels(path).inc()

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._answers.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class BackendCollector(Collector):
    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "url"]
        state = GaugeMetricFamily("torpor_router_backend_state", "1 for the engine's present state.", labels=[*labels, "state"])
        in_flight = GaugeMetricFamily("torpor_router_backend_in_flight", "Requests at the engine.", labels=labels)
        requests = CounterMetricFamily("torpor_router_backend_requests", "Requests sent to the engine.", labels=labels)
        failures = CounterMetricFamily("torpor_router_backend_failures", "Requests the engine failed.", labels=labels)
        for backend in self._backends:
            seen = backend.stats()
            for member in BackendState:
                state.add_metric([seen.role, seen.url, member.value], float(seen.state == member.value))
            in_flight.add_metric([seen.role, seen.url], seen.in_flight)
            requests.add_metric([seen.role, seen.url], seen.requests)
            failures.add_metric([seen.role, seen.url], seen.failures)
        yield from (state, in_flight, requests, failures)
