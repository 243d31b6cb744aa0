from __future__ import annotations

from dataclasses import dataclass

from torpor.connectors.base import ConnectorStats
from torpor.engine.base import EngineState
from torpor.kvcache.stats import KVCacheStats
from torpor.memory.types import MemoryStats
from torpor.scheduler.stats import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. ``memory`` is from before the transaction while the engine is on its way to sleep or awake."""

    state: EngineState
    model_id: str  # architecture@hash of configuration and weights; changes with update_weights
    missing_tags: tuple[str, ...]  # pools that keep the engine from serving
    memory: MemoryStats
    scheduler: SchedulerStats
    cache: KVCacheStats
    connector: ConnectorStats | None
    steps_failed: int  # steps whose requests ended with an error because the model or the device failed
    uptime_s: float
