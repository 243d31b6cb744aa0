"""Fakes of the engine's parts: a worker whose tiny model really reads its memory, a connector that records, and manual time.

``FakeWorker`` allocates in real pools. Its next token depends on every weight and on every KV entry of the text, so lost
weights and stale KV give another text, as with a real model, and the same prompt always gives the same text.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from torpor.connectors.base import (
    ConnectorMetadata,
    ConnectorStats,
    Finished,
    KVConnector,
    KVConnectorScheduler,
    KVConnectorWorker,
)
from torpor.connectors.config import ConnectorConfig
from torpor.engine.base import EngineState
from torpor.engine.config import EngineConfig
from torpor.engine.core import EngineCore
from torpor.engine.executor import UniprocExecutor, WeightsUpdate
from torpor.engine.kv_connector import choose_connector
from torpor.engine.lifecycle_parts import Background
from torpor.engine.startup import bring_up
from torpor.errors import ModelError
from torpor.kvcache.types import BlockId, Epoch, KVCacheSpec
from torpor.memory import Memory, MemoryConfig
from torpor.models.source import ResolvedModel
from torpor.request import GenerationRequest, TokenLogprobs
from torpor.scheduler.output import RunnerOutput, ScheduledSequence, SchedulerOutput

VOCABULARY = 251
PERIOD = 64  # weights
MODULUS = (1 << 31) - 1


class ManualBackground:
    """Keeps what was submitted until ``run``; with ``inline`` runs it at once."""

    def __init__(self, *, inline: bool = False) -> None:
        self.inline = inline
        self._pending: list[tuple[Callable[[], Any], Future[Any]]] = []

    @property
    def pending(self) -> int:
        return len(self._pending)

    def submit(self, fn: Callable[[], Any], /) -> Future[Any]:
        future: Future[Any] = Future()
        self._pending.append((fn, future))
        if self.inline:
            self.run()
        return future

    def run(self) -> None:
        """Everything that waits, in order."""
        pending, self._pending = self._pending, []
        for fn, future in pending:
            try:
                future.set_result(fn())
            except Exception as error:
                future.set_exception(error)


class FakeWorker:
    """Satisfies ``torpor.engine.executor.Worker``."""

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        exportable: bool = False,
        model_id: str = "fake@1",
    ) -> None:
        self._memory = memory or Memory(MemoryConfig(driver="host", extent_bytes=1 << 20))
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._exportable = exportable
        self._model_id = model_id
        self._spec: KVCacheSpec | None = None
        self.weights: torch.Tensor
        self.block_tables: torch.Tensor
        self.kv_caches: dict[str, torch.Tensor] = {}
        self.connector: KVConnectorWorker | None = None
        self.fail_next: Exception | None = None  # raised by the next step that computes something
        self.fail_reload: Exception | None = None
        self.reloads = self.steps = 0
        self.closed = False

    @property
    def memory(self) -> Memory:
        return self._memory

    @property
    def facts(self) -> dict[str, str]:
        return {"threads": "1"}

    @property
    def kv_spec(self) -> KVCacheSpec:
        assert self._spec is not None
        return self._spec

    def load(self, progress: Callable[[str, float], None]) -> None:
        self.weights = self._memory.pool("weights", policy="host").empty((PERIOD,), dtype=torch.float32)
        self._fill()
        progress("loading weights", 1.0)

    def _fill(self) -> None:
        version = int(self._model_id.partition("@")[2])
        self.weights.copy_((torch.arange(PERIOD, dtype=torch.float32) * 7919 + 13 * version) % 1009)

    def prepare_update(self, source: str) -> WeightsUpdate:
        """``source`` is ``fake@`` and a number, which other weights come of."""
        if not re.fullmatch(r"fake@\d+", source):
            raise ModelError(f"model {source!r}: no such file or folder", path=source)

        def take() -> None:
            self._model_id = source

        return WeightsUpdate(source, take)

    def reload_weights(self) -> None:
        if self.fail_reload is not None:
            raise self.fail_reload
        self.reloads += 1
        self._fill()

    def determine_num_blocks(self) -> int:
        return self._num_blocks

    def initialize_kv_cache(self, num_blocks: int) -> KVCacheSpec:
        self._spec = KVCacheSpec(
            model_id=self._model_id,
            num_layers=1,
            num_blocks=num_blocks,
            block_size=self._block_size,
            num_kv_heads=1,
            head_dim=2,
            dtype="float32",
        )
        pool = self._memory.pool("kv_cache", policy="discard", exportable=self._exportable, guarded=self._exportable)
        self.kv_caches = {"layers.0": pool.zeros((2, num_blocks, self._block_size, 1, 2), dtype=torch.float32)}
        self.block_tables = self._memory.pool("runtime", policy="host").zeros((num_blocks,), dtype=torch.int64)
        return self._spec

    def prepare_images(self) -> None:
        pass

    def warm_up(self, progress: Callable[[str, float], None]) -> None:
        progress("warming up", 1.0)

    def init_kv_connector(self, connector: KVConnectorWorker | None) -> None:
        self.connector = connector
        if connector is not None:
            connector.register_kv_caches(self.kv_caches, self.kv_spec, self._memory)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.steps += 1
        if self.connector is not None and output.connector_metadata is not None:
            self.connector.start_load_kv(output.connector_metadata)
        if output.sequences and self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        sampled = {s.request_id: token for s in output.sequences if (token := self._run(s)) is not None}
        logprobs = {
            s.request_id: _logprobs(s, sampled) for s in output.sequences if s.samples and s.sampling.logprobs is not None
        }
        done = self.connector.get_finished() if self.connector is not None else Finished()
        return RunnerOutput(
            sampled=sampled,
            logprobs=logprobs,
            finished_sending=done.sending,
            finished_recving=done.recving,
            failed_recving=done.failed,
        )

    def _run(self, sequence: ScheduledSequence) -> int | None:
        cache, size = self.kv_caches["layers.0"], self._block_size
        table = self.block_tables[: len(sequence.block_ids)]
        table.copy_(torch.tensor(sequence.block_ids, dtype=torch.int64))
        end = sequence.start + len(sequence.token_ids)
        for position, token in zip(range(sequence.start, end), sequence.token_ids, strict=True):
            block, slot = int(table[position // size]), position % size
            cache[0, block, slot, 0, :] = float(token + 1)
            cache[1, block, slot, 0, :] = float(position + 1)
        if not sequence.samples:
            return None
        positions = torch.arange(end)
        entries = cache[:, table[positions // size], positions % size, 0, 0].tolist()
        weights = self.weights.tolist()
        state = 1
        for index, (key, value) in enumerate(zip(*entries, strict=True)):
            state = (state * 31 + int(key) * int(weights[index % PERIOD]) + int(value)) % MODULUS
        state = (state + int(sum(weights))) % MODULUS
        return next(t for t in itertools.count(state % VOCABULARY) if t not in sequence.forbidden_token_ids) % VOCABULARY

    def reset_runtime(self) -> None:
        self.block_tables.zero_()

    def shutdown(self) -> None:
        self.closed = True
        self.drop()
        self._memory.close()

    def drop(self) -> None:
        """Forget the tensors, so that nothing holds their regions."""
        self.kv_caches = {}
        self.weights = self.block_tables = torch.empty(0)
        if isinstance(self.connector, FakeConnectorWorker):
            self.connector.kv_caches = {}


def _logprobs(sequence: ScheduledSequence, sampled: dict[str, int]) -> TokenLogprobs:
    return TokenLogprobs(token_id=sampled[sequence.request_id], logprob=-0.5, rank=1)


class FakeConnectorScheduler(KVConnectorScheduler):
    """Loads for requests with ``{"load": n}`` in their parameters, hands off those with ``{"hand_off": True}``."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, Any] | None] = []  # everything that was published
        self.version: str | None = None  # of the weights, if they were updated
        self.cancelled: list[str] = []
        self._pending: list[str] = []

    def get_num_new_matched_tokens(self, request: GenerationRequest, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = int((request.kv_transfer_params or {}).get("load", 0)) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        return

    def request_finished(
        self, request: GenerationRequest, block_ids: list[BlockId], num_computed_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("hand_off"):
            return False, None
        published = self.metadata[-1] if self.metadata else None
        return True, {"remote_block_ids": list(block_ids), "epoch": (published or {}).get("epoch")}

    def cancel_load(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._pending.append(request_id)

    def build_connector_meta(self) -> ConnectorMetadata:
        pending, self._pending = self._pending, []
        return ConnectorMetadata(cancelled=pending)

    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        return

    def set_kv_metadata(self, metadata: dict[str, Any] | None) -> None:
        self.metadata.append(metadata)

    def set_weights_version(self, version: str) -> None:
        self.version = version


class FakeConnectorWorker(KVConnectorWorker):
    """Allocates a buffer while registering, as connectors do, and records what it is told. ``next_finished`` is what it
    reports."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version: str | None = None  # of the weights, if they were updated
        self.kv_caches: dict[str, torch.Tensor] = {}
        self.memory: Memory | None = None
        self.buffer: torch.Tensor | None = None
        self.fail_release: Exception | None = None
        self.fail_restore: Exception | None = None
        self.ignores_cancels = False
        self.next_finished = Finished()
        self.tell: Callable[[], None] = lambda: None
        self._epoch: Epoch | None = None
        self._last = Epoch.first()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec, memory: Memory) -> None:
        self.calls.append("register")
        self.kv_caches, self.memory = kv_caches, memory
        self.buffer = torch.zeros(1024)
        self._epoch = self._last

    def set_weights_version(self, version: str) -> None:
        self.version = version

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        if metadata.cancelled and not self.ignores_cancels:
            self.next_finished = Finished(failed=frozenset(metadata.cancelled))

    def tell_when_finished(self, tell: Callable[[], None]) -> None:
        self.tell = tell

    def get_finished(self) -> Finished:
        finished, self.next_finished = self.next_finished, Finished()
        return finished

    def release_kv_caches(self) -> None:
        self.calls.append("release")
        if self.fail_release is not None:
            raise self.fail_release
        self._epoch = None

    def restore_kv_caches(self) -> None:
        self.calls.append("restore")
        if self.fail_restore is not None:
            raise self.fail_restore
        if self._epoch is None:
            self._epoch = self._last = self._last.next()

    def get_handshake_metadata(self) -> dict[str, Any] | None:
        return {"epoch": str(self._epoch)} if self._epoch else None

    def epoch(self) -> Epoch | None:
        return self._epoch

    def stats(self) -> ConnectorStats:
        return ConnectorStats(
            connector="fake",
            engine_id="fake",
            path="none",
            epoch=str(self._epoch) if self._epoch else None,
            registered_bytes=0,
            pending_hand_offs=0,
            loads_in_flight=0,
            loads_done=0,
            loads_failed=0,
            bytes_received=0,
        )

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class FakeConnector(KVConnector):
    """Follows the mapping of the KV cache; ``FixedConnector`` does not."""

    supports_sleep_mode = True
    supports_weight_updates = True
    workers: ClassVar[list[FakeConnectorWorker]] = []  # every one made, newest last
    schedulers: ClassVar[list[FakeConnectorScheduler]] = []

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        side = FakeConnectorScheduler()
        cls.schedulers.append(side)
        return side

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        worker = FakeConnectorWorker()
        cls.workers.append(worker)
        return worker


class FixedConnector(FakeConnector):
    supports_sleep_mode = False


def fake_model(max_model_len: int) -> ResolvedModel:
    """What ``FakeWorker`` says it runs."""
    text = SimpleNamespace(vocab_size=VOCABULARY)
    return ResolvedModel(
        name="fake",
        path=Path(),
        model_id="fake@1",
        tokenizer_path="",
        hf_config=SimpleNamespace(get_text_config=lambda: text),
        eos_token_ids=(),
        max_model_len=max_model_len,
        checkpoint=None,
        weights_hash="1",
    )


def fake_core(
    config: EngineConfig,
    worker: FakeWorker | None = None,
    *,
    connector: type[KVConnector] | None = None,
    connector_config: ConnectorConfig | None = None,
    max_model_len: int = 128,
    background: Background | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_state: Callable[[EngineState], None] = lambda state: None,
    on_ready: Callable[[], None] = lambda: None,
    progress: Callable[[str, float], None] = lambda phase, fraction: None,
) -> EngineCore:
    """A core over a ``FakeWorker``, brought up by ``torpor.engine.startup``, with ``connector`` if given. What ``config`` says
    of model, cache size and connector is not looked at."""
    chosen = None
    if connector is not None:
        chosen = choose_connector(connector_config or ConnectorConfig(connector=connector.__name__), config.sleep, connector)
    return bring_up(
        config,
        fake_model(max_model_len),
        UniprocExecutor(worker or FakeWorker()),
        chosen,
        progress=progress,
        on_state=on_state,
        on_ready=on_ready,
        background=background,
        clock=clock,
    )
