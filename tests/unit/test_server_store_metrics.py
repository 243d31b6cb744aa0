"""What a connector that keeps KV counts reaches /metrics."""

from __future__ import annotations

import dataclasses

from torpor.connectors import StoreStats
from torpor.engine.base import EngineState
from torpor.server.engine_metrics import EngineCollector


def test_a_store_s_figures_are_metrics_and_what_only_grows_is_a_counter() -> None:
    figures = {field.name: index for index, field in enumerate(dataclasses.fields(StoreStats), 1)}
    collector = EngineCollector()
    collector.set(EngineState.AWAKE, {"connector": {"store": figures}})
    found = {metric.name: metric for metric in collector.collect() if metric.name.startswith("torpor_kv_store_")}
    assert {m.samples[0].name: m.samples[0].value for m in found.values()} == {
        f"torpor_kv_store_{name}" + ("_total" if found[f"torpor_kv_store_{name}"].type == "counter" else ""): float(value)
        for name, value in figures.items()
    }
    gauges = {name for name, metric in found.items() if metric.type == "gauge"}
    now = ("host_blocks", "host_bytes", "host_limit_bytes", "disk_blocks", "disk_bytes", "disk_limit_bytes")
    assert gauges == {f"torpor_kv_store_{name}" for name in now}


def test_without_a_store_there_are_none() -> None:
    collector = EngineCollector()
    collector.set(EngineState.AWAKE, {"connector": {"store": None}})
    assert not [metric for metric in collector.collect() if metric.name.startswith("torpor_kv_store_")]
