"""The seam between the engine core and whoever holds device memory: one worker here, one per rank with several.

An executor is where ranks are hidden. With more than one it prepares on all, then commits on all, or aborts on all; its replies
carry the operation's id, and every rank's reply is read before anything is raised (E9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torpor.connectors.base import ConnectorStats, KVConnector
from torpor.connectors.config import ConnectorConfig
from torpor.engine.kv_connector import ConnectorSubscription, subscribe
from torpor.kvcache.types import KVCacheSpec
from torpor.memory.types import Content, MemoryStats, Policy, Residency, SleepReport, WakeReport
from torpor.scheduler.output import RunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from torpor.connectors.base import KVConnectorWorker
    from torpor.memory import Memory

Progress = Callable[[str, float], None]
"""Told (phase, fraction 0..1) while something long goes on."""

WEIGHTS, KV_CACHE, RUNTIME, CUDA_GRAPH = "weights", "kv_cache", "runtime", "cuda_graph"


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """A checkpoint that was found fit."""

    model_id: str
    take: Callable[[], None]  # from now on ``reload_weights`` reads it


class Worker(Protocol):
    """What an executor needs of the thing that holds one device's model."""

    @property
    def memory(self) -> Memory: ...

    @property
    def facts(self) -> dict[str, str]:
        """Its lines of the start-up table."""
        ...

    @property
    def kv_spec(self) -> KVCacheSpec:
        """Known after initialize_kv_cache."""
        ...

    def load(self, progress: Progress) -> None: ...

    def determine_num_blocks(self) -> int: ...

    def initialize_kv_cache(self, num_blocks: int) -> KVCacheSpec: ...

    def warm_up(self, progress: Progress) -> None:
        """Prepares what a step needs beside memory: compiled kernels, captured graphs."""
        ...

    def prepare_images(self) -> None:
        """Where so configured, makes the host images that the first sleep will need."""
        ...

    def init_kv_connector(self, connector: KVConnectorWorker | None) -> None:
        """Gives the connector the KV tensors, outside every pool (E1)."""
        ...

    def execute(self, output: SchedulerOutput) -> RunnerOutput: ...

    def prepare_update(self, source: str) -> WeightsUpdate:
        """The checkpoint ``source``, if its weights can take the place of those loaded. Changes nothing."""
        ...

    def reload_weights(self) -> None: ...

    def reset_runtime(self) -> None: ...

    def shutdown(self) -> None: ...


class Executor(Protocol):
    """All methods block and are called from one thread at a time: the engine's loop thread, or the one that runs a memory
    transaction while the loop only answers calls. ``memory_stats`` is the exception: never during a transaction."""

    @property
    def kv_spec(self) -> KVCacheSpec: ...

    def load(self, progress: Progress) -> None: ...

    def determine_num_blocks(self) -> int: ...

    def initialize_kv_cache(self, num_blocks: int) -> None: ...

    def warm_up(self, progress: Progress) -> None: ...

    def prepare_images(self) -> None: ...

    def attach_connector(
        self, connector: type[KVConnector], config: ConnectorConfig, tell: Callable[[], None] = lambda: None
    ) -> None:
        """Creates the worker side, gives it the KV cache outside every pool (E1), subscribes it where it declares support
        (E5)."""
        ...

    def execute(self, output: SchedulerOutput) -> RunnerOutput: ...

    def sleep(self, policies: Mapping[str, Policy]) -> SleepReport:
        """The memory transaction with its hooks (M2, M4). Tags not named are kept."""
        ...

    def wake(self, tags: Sequence[str] | None) -> WakeReport: ...

    def refill_lost(self) -> list[str]:
        """Makes again, from its source, what a sleep discarded and is mapped now (weights, runtime). Returns those tags."""
        ...

    def update_weights(self, source: str) -> str:
        """The next wake fills the weights from the checkpoint ``source``; what is left of the present ones is given up (M8).
        Returns its ``model_id``. Blocks while files are hashed. ModelError, ConfigurationError: nothing has changed."""
        ...

    def set_weights_version(self, version: str) -> None:
        """KV is computed with other weights: the worker connector tells its peers. StateError while it serves them."""
        ...

    def mark_valid(self, tag: str) -> None: ...

    def memory_stats(self) -> MemoryStats: ...

    def handshake_metadata(self) -> dict[str, Any] | None:
        """The worker connector's; None without a connector or while it is released."""
        ...

    def connector_stats(self) -> ConnectorStats | None: ...

    def facts(self) -> dict[str, str]:
        """The worker's lines of the start-up table."""
        ...

    def shutdown(self) -> None:
        """Idempotent; after a failure it can be repeated. Unsubscribes the connector before anything is unmapped."""
        ...


class UniprocExecutor:
    """One worker, in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._connector: KVConnectorWorker | None = None
        self._subscription: ConnectorSubscription | None = None
        self._closed = False

    @property
    def worker(self) -> Worker:
        return self._worker

    @property
    def kv_spec(self) -> KVCacheSpec:
        return self._worker.kv_spec

    def load(self, progress: Progress) -> None:
        self._worker.load(progress)

    def determine_num_blocks(self) -> int:
        return self._worker.determine_num_blocks()

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._worker.initialize_kv_cache(num_blocks)

    def warm_up(self, progress: Progress) -> None:
        self._worker.warm_up(progress)

    def prepare_images(self) -> None:
        self._worker.prepare_images()

    def attach_connector(
        self, connector: type[KVConnector], config: ConnectorConfig, tell: Callable[[], None] = lambda: None
    ) -> None:
        worker_side = connector.create_worker(config, self._worker.kv_spec)
        worker_side.tell_when_finished(tell)
        self._connector = worker_side
        self._worker.init_kv_connector(worker_side)
        self._subscription = subscribe(connector, worker_side, self._worker.memory, config.connector)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        return self._worker.execute(output)

    def sleep(self, policies: Mapping[str, Policy]) -> SleepReport:
        return self._worker.memory.sleep(policies)

    def wake(self, tags: Sequence[str] | None) -> WakeReport:
        return self._worker.memory.wake(tags)

    def refill_lost(self) -> list[str]:
        refill: dict[str, Callable[[], None]] = {
            WEIGHTS: self._worker.reload_weights,
            RUNTIME: self._worker.reset_runtime,
            CUDA_GRAPH: lambda: None,  # every step writes what it reads there
        }
        stats = self._worker.memory.stats()
        lost = [t.tag for t in stats.tags if t.residency is Residency.RESIDENT and t.content is Content.LOST and t.tag in refill]
        for tag in lost:
            refill[tag]()
            self._worker.memory.mark_valid(tag)
        return lost

    def update_weights(self, source: str) -> str:
        update = self._worker.prepare_update(source)
        # Before the new source is taken: if this fails, a wake still brings back weights of the version that everybody knows.
        self._worker.memory.sleep({WEIGHTS: "discard"})
        update.take()
        return update.model_id

    def set_weights_version(self, version: str) -> None:
        if self._connector is not None:
            self._connector.set_weights_version(version)

    def mark_valid(self, tag: str) -> None:
        self._worker.memory.mark_valid(tag)

    def memory_stats(self) -> MemoryStats:
        return self._worker.memory.stats()

    def handshake_metadata(self) -> dict[str, Any] | None:
        return self._connector.get_handshake_metadata() if self._connector else None

    def connector_stats(self) -> ConnectorStats | None:
        return self._connector.stats() if self._connector else None

    def facts(self) -> dict[str, str]:
        return self._worker.facts

    def shutdown(self) -> None:
        if self._closed:
            return
        if self._subscription is not None:
            self._subscription.close()
        if self._connector is not None:
            self._connector.shutdown()
        self._worker.shutdown()
        self._closed = True
