"""How an engine core comes up, in the one order that is right (E1, E4).

1. refuse a connector that could not follow a sleep          nothing is loaded yet
2. weights, runtime state and the KV cache in their pools    and nothing else in them
3. outside every pool: the connector gets the KV tensors, is subscribed to their mapping, and its metadata is published
4. admission opens
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from torpor.connectors.base import KVConnector, KVConnectorScheduler
from torpor.connectors.config import ConnectorConfig
from torpor.engine import collector
from torpor.engine.base import EngineInfo, EngineState
from torpor.engine.config import EngineConfig
from torpor.engine.core import EngineCore
from torpor.engine.executor import Executor, Progress, UniprocExecutor
from torpor.engine.kv_connector import choose_connector
from torpor.engine.lifecycle_parts import Background
from torpor.engine.sleep_plan import sleep_rules
from torpor.kvcache.manager import KVCacheManager
from torpor.memory import choose_driver
from torpor.memory.types import MemoryStats
from torpor.scheduler import Scheduler

if TYPE_CHECKING:
    from torpor.models import ResolvedModel

T = TypeVar("T")


class PhaseTimer:
    """Passes progress on, and remembers how long each phase took. The phases follow each other, so they add up to the whole."""

    def __init__(self, progress: Progress, clock: Callable[[], float]) -> None:
        self._progress = progress
        self._clock = clock
        self._begun = clock()
        self.seconds: dict[str, float] = {}

    @property
    def total_s(self) -> float:
        return self._clock() - self._begun

    def run(self, phase: str, fn: Callable[[], T], *, tells: bool = False) -> T:
        """``tells``: ``fn`` reports its progress itself."""
        if not tells:
            self._progress(phase, 0.0)
        begun = self._clock()
        result = fn()
        self.seconds[phase] = self._clock() - begun
        return result


def start_core(
    config: EngineConfig,
    *,
    progress: Progress = lambda phase, fraction: None,
    on_state: Callable[[EngineState], None] = lambda state: None,
    on_ready: Callable[[], None] = lambda: None,
) -> EngineCore:
    """An engine core that is awake. Blocks while it loads. When it raises, everything it had taken is given back."""
    timer = PhaseTimer(progress, time.monotonic)
    kind_and_config = None
    if config.connector is not None:  # before what takes seconds: most of what can be wrong with one shows without it
        kind_and_config = timer.run("choosing the connector", lambda: choose_connector(_with_lease(config), config.sleep))
    timer.run("importing the model libraries", import_model_libraries)
    from torpor.engine.head_start import HeadStart
    from torpor.engine.worker import Worker
    from torpor.models import resolve_model

    config = on_this_machine(config)
    with contextlib.closing(HeadStart(config)) as head_start:
        resolved = timer.run("checking the model", lambda: resolve_model(config.model, progress))
        guarded = kind_and_config is None or kind_and_config[0].guarded
        executor = UniprocExecutor(Worker(config, resolved, memory=head_start.memory(), kv_guarded=guarded))
        head_start.hand_over()
    return bring_up(
        config, resolved, executor, kind_and_config, progress=progress, on_state=on_state, on_ready=on_ready, timer=timer
    )


def import_model_libraries() -> None:
    """torch and transformers: seconds. The garbage collector waits: looking through their 360,000 objects is a fifth of it."""
    with collector.paused():
        importlib.import_module("torpor.engine.worker")


def on_this_machine(config: EngineConfig) -> EngineConfig:
    """What depends on the device is filled in."""
    memory = dataclasses.replace(config.memory, driver=choose_driver(config.memory.driver, config.memory.device))
    scheduler = config.scheduler.on_gpu() if memory.driver == "cuda" else config.scheduler
    return dataclasses.replace(config, memory=memory, scheduler=scheduler)


def _with_lease(config: EngineConfig) -> ConnectorConfig:
    """The lease of a hand-off is the scheduler's setting, and the connector's to keep."""
    assert config.connector is not None
    return dataclasses.replace(config.connector, handoff_lease_s=config.scheduler.handoff_lease_s)


def bring_up(
    config: EngineConfig,
    resolved: ResolvedModel,
    executor: Executor,
    connector: tuple[type[KVConnector], ConnectorConfig] | None,
    *,
    progress: Progress = lambda phase, fraction: None,
    on_state: Callable[[EngineState], None] = lambda state: None,
    on_ready: Callable[[], None] = lambda: None,
    background: Background | None = None,
    clock: Callable[[], float] = time.monotonic,
    timer: PhaseTimer | None = None,
) -> EngineCore:
    """Steps 2 to 4 over an executor that has loaded nothing yet. The executor is shut down when this raises."""
    with ExitStack() as undo:
        undo.callback(executor.shutdown)
        timer = timer or PhaseTimer(progress, clock)
        timer.run("loading weights", lambda: executor.load(progress), tells=True)
        timer.run("allocating the KV cache", lambda: executor.initialize_kv_cache(executor.determine_num_blocks()))
        timer.run("warming up", lambda: executor.warm_up(progress), tells=True)
        timer.run("making images", executor.prepare_images)
        scheduler_side = None
        if connector is not None:
            kind, connector_config = connector
            timer.run("registering the KV cache", lambda: executor.attach_connector(kind, connector_config, on_ready))
            scheduler_side = kind.create_scheduler(connector_config, executor.kv_spec)
        core = EngineCore(
            config,
            engine_info(config, resolved, executor, connector, timer),
            _scheduler(config, resolved, executor, scheduler_side, clock),
            executor,
            scheduler_side,
            sleep_rules(config.sleep, connector),
            background=background,
            on_state=on_state,
            on_ready=on_ready,
            clock=clock,
        )
        undo.pop_all()
        return core


def _scheduler(
    config: EngineConfig,
    resolved: ResolvedModel,
    executor: Executor,
    connector: KVConnectorScheduler | None,
    clock: Callable[[], float],
) -> Scheduler:
    spec = executor.kv_spec
    kv = KVCacheManager(spec.num_blocks, spec.block_size, config.cache.enable_prefix_caching, resolved.model_id)
    return Scheduler(config.scheduler, kv, resolved.max_model_len, connector, clock=clock)


def engine_info(
    config: EngineConfig,
    resolved: ResolvedModel,
    executor: Executor,
    connector: tuple[type[KVConnector], ConnectorConfig] | None,
    timer: PhaseTimer,
) -> EngineInfo:
    spec = executor.kv_spec
    return EngineInfo(
        model_name=resolved.name,
        model_id=resolved.model_id,
        dtype=spec.dtype,
        max_model_len=resolved.max_model_len,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        eos_token_ids=resolved.eos_token_ids,
        tokenizer_path=resolved.tokenizer_path,
        vocab_size=getattr(resolved.hf_config.get_text_config(), "vocab_size", None),
        engine_id=connector[1].engine_id if connector else None,
        startup=startup_table(config, executor, timer),
    )


def startup_table(config: EngineConfig, executor: Executor, timer: PhaseTimer) -> dict[str, str]:
    """What a person wants to see once: what was chosen, how big it is, how long it took."""
    spec, memory = executor.kv_spec, executor.memory_stats()
    connector = executor.connector_stats()
    tokens = spec.num_blocks * spec.block_size
    return {
        **executor.facts(),
        "dtype": spec.dtype,
        "KV cache": f"{spec.num_blocks} blocks of {spec.block_size} tokens ({tokens} tokens)",
        "pools": _pools_text(memory),
        "sleep": _sleep_text(config),
        "connector": f"{connector.connector}: {connector.path}" if connector else "none",
        **{f"{phase} took": f"{seconds:.1f} s" for phase, seconds in timer.seconds.items()},
        "all of it took": f"{timer.total_s:.1f} s",
    }


def _pools_text(memory: MemoryStats) -> str:
    sizes = ", ".join(f"{t.tag} {t.resident_bytes / 2**20:.1f} MiB" for t in memory.tags)
    return f"{sizes} ({memory.driver} driver)"


def _sleep_text(config: EngineConfig) -> str:
    if config.sleep.enable_sleep_mode:
        return f"on; while asleep requests: {config.sleep.while_asleep}"
    return "pools only" if config.sleep.enable_pools else "off"
