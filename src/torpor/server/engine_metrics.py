"""The engine's stats as Prometheus metrics. A row says where a figure lies, what it is called and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torpor.engine.base import EngineState
from torpor.memory.types import Content, Residency

GAUGE, COUNTER = "gauge", "counter"

TAG_ROWS = (
    ("resident_bytes", "torpor_pool_resident_bytes", "Physical device memory mapped for the pool."),
    ("reserved_bytes", "torpor_pool_reserved_bytes", "Address space of the pool."),
    ("allocated_bytes", "torpor_pool_allocated_bytes", "Bytes handed out to tensors."),
    ("image_bytes", "torpor_pool_image_bytes", "Content held in host images."),
)
# (section of stats, key, metric, kind, help)
ROWS = (
    ("memory", "mapped_bytes", "torpor_memory_mapped_bytes", GAUGE, "Physical device memory mapped by all pools."),
    ("memory", "condemned_bytes", "torpor_memory_condemned_bytes", GAUGE, "Unmapped bytes the driver would not take back yet."),
    ("memory", "host_committed_bytes", "torpor_host_image_committed_bytes", GAUGE, "Host memory committed for images."),
    ("memory", "sleeps", "torpor_sleeps", COUNTER, "Sleeps that unmapped memory."),
    ("memory", "wakes", "torpor_wakes", COUNTER, "Wakes that mapped memory."),
    ("connector", "registered_bytes", "torpor_connector_registered_bytes", GAUGE, "KV cache bytes known to the transport."),
    ("connector", "pending_hand_offs", "torpor_connector_pending_hand_offs", GAUGE, "Finished prefills nobody has read yet."),
    ("connector", "loads_in_flight", "torpor_connector_loads_pending", GAUGE, "Loads from peers in flight."),
    ("connector", "loads_done", "torpor_connector_loads_done", COUNTER, "Loads from peers that arrived whole."),
    ("connector", "loads_failed", "torpor_connector_loads_failed", COUNTER, "Loads that did not: recomputed."),
    ("connector", "bytes_received", "torpor_connector_received_bytes", COUNTER, "Bytes read from peers."),
)


class EngineCollector(Collector):
    """Holds the snapshot of the present scrape."""

    def __init__(self) -> None:
        self._state = EngineState.STARTING
        self._stats: dict[str, Any] | None = None

    def set(self, state: EngineState, stats: dict[str, Any] | None) -> None:
        self._state, self._stats = state, stats

    def describe(self) -> list[Metric]:
        """Without it the registry would collect at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "torpor_up", "1 while the engine lives, asleep or not.", float(self._state is not EngineState.DEAD)
        )
        yield labelled(
            "torpor_engine_state", "1 for the present state.", "state", {s.value: float(s is self._state) for s in EngineState}
        )
        if self._stats is None:
            return
        yield from pool_metrics(self._stats.get("memory") or {})
        for section, key, name, kind, help_text in ROWS:
            value = (self._stats.get(section) or {}).get(key)
            if value is not None:
                yield (GaugeMetricFamily if kind == GAUGE else CounterMetricFamily)(name, help_text, float(value))
        for section in ("scheduler", "cache"):
            yield from plain_figures(section, self._stats.get(section) or {})
        yield from plain_figures("kv_store", (self._stats.get("connector") or {}).get("store") or {})


def pool_metrics(memory: Mapping[str, Any]) -> Iterator[Metric]:
    tags = memory.get("tags", ())
    for key, name, help_text in TAG_ROWS:
        yield labelled(name, help_text, "tag", {t["tag"]: float(t[key]) for t in tags})
    for key, values in (("residency", Residency), ("content", Content)):
        family = GaugeMetricFamily(f"torpor_pool_{key}", f"1 for the pool's present {key}.", labels=["tag", key])
        for tag in tags:
            for member in values:
                family.add_metric([tag["tag"], member.value], float(tag[key] == member.value))
        yield family


def plain_figures(section: str, figures: Mapping[str, Any]) -> Iterator[Metric]:
    """Whatever numbers the section has, under their own names; what only grows is named so there and is a counter here."""
    for key, value in figures.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        family = CounterMetricFamily if key in MONOTONE else GaugeMetricFamily
        yield family(f"torpor_{section}_{key}", f"The {section}'s {key.replace('_', ' ')}.", float(value))


MONOTONE = frozenset(
    (
        "steps",
        "preemptions",
        "frozen",
        "finished",
        "aborted",
        "failed",
        "prompt_tokens",
        "cached_tokens",
        "computed_tokens",
        "generated_tokens",
        "loads_done",
        "loads_failed",
        "loads_timed_out",
        "prefix_queries",
        "prefix_hits",
        "evictions",
        "resets",
        "saved_blocks",
        "loaded_blocks",
        "evicted_blocks",
        "skipped_blocks",
        "disk_errors",
        "bad_files",
        "leftover_files",
    )
)


def labelled(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for value, figure in values.items():
        family.add_metric([value], figure)
    return family
