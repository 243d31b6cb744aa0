"""The worker owns everything that lies in device memory: the pools, the model, the KV cache, and the connector's registration
of it."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch

from torpor.connectors.base import ConnectorMetadata, KVConnectorWorker, works_by_layer
from torpor.engine.config import EngineConfig
from torpor.engine.executor import WeightsUpdate
from torpor.engine.gpu import follow_memory, gpu_facts, kv_budget_bytes, let_go, use_gpu
from torpor.engine.graphs import GraphRunner, graph_obstacle
from torpor.engine.inputs import StepInputs
from torpor.engine.runner import Runner
from torpor.errors import ConfigurationError, DeviceMemoryError, StateError
from torpor.kvcache.tensors import allocate_kv_caches
from torpor.kvcache.types import KVCacheSpec
from torpor.memory import AheadReport, Memory, SharingReport
from torpor.models import LoadedModel, ResolvedModel, load_model, resolve_update
from torpor.models.hardware import available_memory_bytes, usable_cores
from torpor.models.loader import RUNTIME_TAG, WEIGHTS_TAG
from torpor.scheduler.output import RunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from torpor._native import Device
    from torpor.models.gguf_convert import Progress

log = logging.getLogger(__name__)

HOST_KV_BYTES = 2 << 30  # on the host, memory is shared with everybody: without a setting the KV cache takes at most this
HOST_KV_FRACTION = 0.25  # ... and at most this part of what is free


class Worker:
    """Made once per engine; its methods are called by the engine's loop thread, in the order they stand here (E1)."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedModel,
        *,
        device: Device | None = None,
        memory: Memory | None = None,
        kv_guarded: bool = True,
    ) -> None:
        """``memory``: what was opened ahead with the same configuration, this worker's from here on. ``device``: one that is open
        already, for tests; otherwise the memory configuration's driver is opened. ``kv_guarded``: the connector's wish for the KV
        cache's pool (P4)."""
        self.config = config
        self.resolved = resolved
        self.threads = _set_threads(config.model.threads)
        self.memory = memory or Memory(config.memory, device=device)
        self._on_gpu = self.memory.device.driver == "cuda"
        self._kv_guarded = kv_guarded
        self._model: LoadedModel | None = None
        self._runner: Runner | None = None
        self._spec: KVCacheSpec | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._connector: KVConnectorWorker | None = None
        self._sharing: SharingReport | None = None
        self._ahead: AheadReport | None = None

    def load(self, progress: Progress = lambda what, done: None) -> None:
        """Load the model: its tensors go into the pools ``weights`` and ``runtime``. ModelError, DeviceMemoryError."""
        if self._model is not None:
            raise StateError("the model is loaded already", state="loaded")
        progress("loading weights", 0.0)
        if self._on_gpu:
            use_gpu(self.memory.config.device)
        through_images = self._on_gpu and self._prepares_images and not self._shares_images
        self._model = load_model(self.resolved, self.config.model, self.memory, through_images=through_images)
        self._share_images()
        progress("loading weights", 1.0)

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise StateError("the model is not loaded: call load() first", state="not loaded")
        return self._model

    @property
    def kv_spec(self) -> KVCacheSpec:
        if self._spec is None:
            raise StateError("there is no KV cache yet: call initialize_kv_cache() first", state="no KV cache")
        return self._spec

    @property
    def kv_caches(self) -> dict[str, torch.Tensor]:
        """The tensors the runner computes with, by layer name; also what a connector registers."""
        return dict(self._kv_caches)

    def determine_num_blocks(self) -> int:
        """Blocks of the KV cache: as configured, or what free memory and the longest possible batch allow. ConfigurationError
        when not one block fits."""
        cache, model = self.config.cache, self.model
        if cache.num_blocks is not None:
            return cache.num_blocks
        per_block = model.kv_spec(1, cache.block_size)
        nbytes = per_block.layer_bytes * per_block.num_layers
        budget = self._default_kv_bytes() if cache.kv_cache_bytes is None else cache.kv_cache_bytes
        if budget < nbytes:
            raise ConfigurationError(
                f"kv_cache_bytes {budget} cannot hold one block: {nbytes} bytes for {cache.block_size} tokens in "
                f"{per_block.num_layers} layers",
                setting="kv_cache_bytes",
                value=budget,
            )
        if cache.kv_cache_bytes is not None:
            return budget // nbytes
        longest = self.config.scheduler.seats * -(-self.resolved.max_model_len // cache.block_size)
        return min(budget // nbytes, longest)

    @property
    def _kv_setting(self) -> str:
        """What says how large the KV cache is."""
        cache = self.config.cache
        chosen = [name for name in ("num_blocks", "kv_cache_bytes") if getattr(cache, name) is not None]
        return chosen[0] if chosen else "gpu_memory_utilization" if self._on_gpu else "kv_cache_bytes"

    def _default_kv_bytes(self) -> int:
        if self._on_gpu:
            cache = self.config.cache
            return kv_budget_bytes(self.model, self.config.scheduler, cache.block_size, cache.gpu_memory_utilization)
        return min(HOST_KV_BYTES, int(HOST_KV_FRACTION * available_memory_bytes()))

    @property
    def _shares_images(self) -> bool:
        return self.config.sleep.pools and self.config.memory.share_images

    def _share_images(self) -> None:
        if self._shares_images:
            if self._on_gpu:
                let_go(self.memory.config.device)
            self._sharing = self.memory.share_images(WEIGHTS_TAG)
            if self._sharing.private_bytes:
                log.warning("the weights' image: %s", self._sharing)

    @property
    def _prepares_images(self) -> bool:
        return self.config.sleep.prepares_images(self.memory.device.driver)

    def initialize_kv_cache(self, num_blocks: int) -> KVCacheSpec:
        """Allocate the KV cache (pool ``kv_cache``) and the runner's inputs (pool ``runtime``). DeviceMemoryError."""
        if self._runner is not None:
            raise StateError("the KV cache exists already", state="initialized")
        spec = self.model.kv_spec(num_blocks, self.config.cache.block_size)
        exportable = self.config.connector is not None
        try:
            caches = allocate_kv_caches(spec, self.memory, exportable=exportable, guarded=self._kv_guarded)
        except DeviceMemoryError as error:
            error.fields.setdefault("setting", self._kv_setting)
            raise
        self._runner = self._make_runner(caches, spec)
        if self._on_gpu:
            follow_memory(self.memory, self.memory.tags)
            let_go(self.memory.config.device)
        self._kv_caches, self._spec = caches, spec
        return spec

    def _make_runner(self, caches: dict[str, torch.Tensor], spec: KVCacheSpec) -> Runner:
        limits, longest = self.config.scheduler, min(self.resolved.max_model_len, spec.num_blocks * spec.block_size)
        inputs = StepInputs(
            self.memory.pool(RUNTIME_TAG, policy="host"),
            max_tokens=limits.token_budget,
            max_seqs=limits.seats,
            blocks_per_seq=-(-longest // spec.block_size),
            block_size=spec.block_size,
        )
        if self.graph_obstacle is None:
            return GraphRunner(self.model, caches, spec, inputs, self.memory)
        return Runner(self.model, caches, spec, inputs)

    @property
    def graph_obstacle(self) -> str | None:
        """Why steps are not captured; None if they are."""
        return "enforce_eager is set" if self.config.model.enforce_eager else graph_obstacle(self.model)

    def warm_up(self, progress: Progress = lambda what, done: None) -> None:
        """Capture the graphs of a runner that replays them. Writes to no block of the KV cache."""
        if isinstance(self._runner, GraphRunner):
            self._runner.capture_all(lambda done: progress("capturing CUDA graphs", done))

    def prepare_images(self) -> None:
        """Where so configured, the images of what goes to the host in a sleep. HostMemoryError."""
        if self._prepares_images:
            self.memory.prepare_images(fill=True)
            self._ahead = self.memory.end_ahead()

    @property
    def facts(self) -> dict[str, str]:
        """Lines of the start-up table."""
        images = {"weights' image": str(self._sharing)} if self._sharing else {}
        if self._ahead is not None:
            images["images' host memory"] = str(self._ahead)
        if not self._on_gpu:
            return {"threads": str(self.threads), **images}
        obstacle, runner = self.graph_obstacle, self._runner
        graphs = (
            f"{runner.captures}, up to {runner.buckets[-1]} sequences" if isinstance(runner, GraphRunner) else f"none: {obstacle}"
        )
        layers = "as transformers computes them" if self.model.fused is None else "fused"
        names = {"attention": self.model.backend.name, "layers": layers, "CUDA graphs": graphs}
        return {**gpu_facts(self.memory.config.device), **names, **images}

    def init_kv_connector(self, connector: KVConnectorWorker | None) -> None:
        """Give the connector the runner's own KV tensors. Called outside every pool: what the connector allocates while it
        registers belongs to no tag (E1). TransportError and ConnectorError come from the connector; it is not in use then."""
        spec = self.kv_spec
        if connector is None:
            return
        if self._connector is not None:
            raise StateError("a connector is registered already", state="registered")
        connector.register_kv_caches(self.kv_caches, spec, self.memory)
        self._connector = connector
        if self._runner is not None and works_by_layer(connector):
            self._runner.events = connector

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """One step: begin the loads that are asked for, run the model, and gather what the connector finished meanwhile."""
        if self._runner is None:
            raise StateError("there is no KV cache yet: call initialize_kv_cache() first", state="no KV cache")
        connector = self._connector
        if connector is not None and isinstance(output.connector_metadata, ConnectorMetadata) and output.connector_metadata:
            connector.start_load_kv(output.connector_metadata)
        result = self._runner.execute(output)
        if connector is None:
            return result
        if self._runner.events is not None:
            connector.wait_for_save()
        finished = connector.get_finished()
        return dataclasses.replace(
            result, finished_sending=finished.sending, finished_recving=finished.recving, failed_recving=finished.failed
        )

    def prepare_update(self, source: str) -> WeightsUpdate:
        """The checkpoint ``source``, if its weights can take the place of those loaded: ModelError, ConfigurationError. Changes
        nothing; blocks while files are hashed."""
        resolved = resolve_update(self.resolved, self.config.model, source)
        self.model.check_weights(resolved)

        def take() -> None:
            self.model.use_weights(resolved)
            self.resolved = resolved

        return WeightsUpdate(resolved.model_id, take)

    def reload_weights(self) -> None:
        """Fill ``weights`` from the model's source again, after a wake that left it lost, and mark it valid (level 2)."""
        self.model.reload_weights()
        self.memory.mark_valid(WEIGHTS_TAG)
        self._share_images()

    def reset_runtime(self) -> None:
        """Compute ``runtime`` again, after a wake that left it lost, and mark it valid. Of the runner's inputs every step writes
        what it needs."""
        self.model.reset_buffers()
        if self._runner is not None:
            self._runner.forget()
        self.memory.mark_valid("runtime")

    def shutdown(self) -> None:
        """Close the connector, then the memory; tensors must not be used afterwards. Idempotent."""
        if self._connector is not None:
            self._connector.shutdown()
            self._connector = None
        self._runner, self._model, self._kv_caches = None, None, {}
        self.memory.close()


def _set_threads(setting: int | None) -> int:
    """More threads than free cores are far slower than one, so the number is always set on purpose."""
    threads = setting if setting is not None else min(usable_cores(), torch.get_num_threads())
    torch.set_num_threads(threads)
    return threads
