"""A stand-in for an engine around a KV connector: real pools, a real KV cache, both sides of the connector, no model.

What a prefill "computes" is a pattern that depends on the prompt, so anybody can say what the right bytes are: ``expected``. Use
two of them, in one process or in two, to see what a connector does when one of them sleeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch

from torpor._native import Device
from torpor.connectors import ConnectorConfig, Finished, KVConnector, get_connector, lmcache_engine, mooncake_engine, nixl_agent
from torpor.errors import ConnectorError
from torpor.kvcache.tensors import allocate_kv_caches
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.memory import Memory, MemoryConfig, SleepReport, WakeReport
from torpor.request import GenerationRequest, SamplingParams

SMALL_SPEC = KVCacheSpec(
    model_id="stand-in@1", num_layers=2, num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32"
)
POLL_S = 0.002


def missing_package(connector: str) -> str | None:
    """Why a connector of ``torpor.connectors.registry`` cannot run here: its package is not installed, or cannot be loaded."""
    load = {
        "nixl": nixl_agent.load_package,
        "mooncake": mooncake_engine.load_package,
        "lmcache": lmcache_engine.load_package,
    }.get(connector)
    try:
        if load is not None:
            load()
    except ConnectorError as error:
        return str(error)
    return None


class KVEngine:
    """Used by one thread. ``close`` is idempotent; it is a context manager."""

    def __init__(
        self,
        config: ConnectorConfig,
        spec: KVCacheSpec = SMALL_SPEC,
        *,
        kind: type[KVConnector] | None = None,
        device: Device | None = None,
        memory: MemoryConfig | None = None,
    ) -> None:
        """``kind``: the connector's class, found by ``config.connector`` when not given. ``memory``: the host driver when not
        given; with ``cuda`` the KV cache lies on that device."""
        kind = (kind or get_connector(config.connector)).configured(config)
        self.kind = kind
        self.config = dataclasses.replace(config, engine_id=config.engine_id or secrets.token_hex(4))
        self.spec = spec
        self.memory = Memory(memory or MemoryConfig(driver="host", extent_bytes=1 << 20), device=device)
        self.kv_caches = allocate_kv_caches(spec, self.memory, exportable=True, guarded=kind.guarded)
        _zero(self.kv_caches)
        self.kept = False  # whether the last hand-off keeps its blocks until it is reported as "sending"
        self._finished: dict[str, str] = {}
        self._told: SimpleQueue[None] = SimpleQueue()
        self._unsubscribe: Callable[[], None] = _nothing
        try:
            self.scheduler = kind.create_scheduler(self.config, spec)
            self.worker = kind.create_worker(self.config, spec)
            self.worker.tell_when_finished(lambda: self._told.put(None))
            self.worker.register_kv_caches(self.kv_caches, spec, self.memory)
        except BaseException:
            self.close()
            raise
        if kind.supports_sleep_mode:
            self._unsubscribe = self.memory.register_tag_hooks(
                "kv_cache", self.worker.release_kv_caches, self.worker.restore_kv_caches, "connector"
            )
        self.publish()

    # ---- what an engine does -----------------------------------------------------------------------------------------------

    def prefill(self, request_id: str, prompt: Sequence[int], block_ids: Sequence[int]) -> dict[str, Any]:
        """Fills the blocks with the prompt's pattern and hands them off; what the client would get as ``kv_transfer_params``."""
        for index, block in enumerate(block_ids):
            self.write_block(block, expected(self.spec, prompt, index))
        return self.hand_off(request_id, prompt, block_ids)

    def hand_off(self, request_id: str, prompt: Sequence[int], block_ids: Sequence[int]) -> dict[str, Any]:
        """The end of ``prefill``: whatever is in the blocks is taken for the prompt's KV."""
        request = _request(request_id, prompt, {"do_remote_decode": True, "do_remote_prefill": False})
        self.scheduler.check_params(request.kv_transfer_params or {}, len(prompt))
        kept, params = self.scheduler.request_finished(request, [BlockId(b) for b in block_ids], len(prompt))
        self.kept = kept
        if self.kind.finds_by == "params" and not (kept and params):
            raise AssertionError(f"request {request_id} was not handed off")
        self.step()
        return params or {}

    def begin_load(
        self, request_id: str, prompt: Sequence[int], params: dict[str, Any], block_ids: Sequence[int], num_computed: int = 0
    ) -> int:
        """Asks for a hand-off's KV; how many tokens will come. RequestError for params that are refused at the door.
        ``num_computed`` tokens, whole blocks, are there already: ``block_ids`` are for what comes after them."""
        request = _request(request_id, prompt, dict(params))
        self.scheduler.check_params(request.kv_transfer_params or {}, len(prompt))
        tokens, _ = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        needed = -(-tokens // self.spec.block_size)
        self.scheduler.update_state_after_alloc(request, cast(list[BlockId], list(block_ids[:needed])), tokens)
        self.step()
        return tokens

    def load(
        self, request_id: str, prompt: Sequence[int], params: dict[str, Any], block_ids: Sequence[int], timeout_s: float = 10
    ) -> str:
        """``begin_load`` and ``wait``."""
        self.begin_load(request_id, prompt, params, block_ids)
        return self.wait(request_id, timeout_s)

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel_load(request_id)
        self.step()

    def step(self) -> Finished:
        """What the worker does around the model's step."""
        metadata = self.scheduler.build_connector_meta()
        if metadata:
            self.worker.start_load_kv(metadata)
            for layer, tensor in self.kv_caches.items():
                self.worker.wait_for_layer_load(layer)
                self.worker.save_kv_layer(layer, tensor)
            self.worker.wait_for_save()
        finished = self.worker.get_finished()
        for name in ("sending", "recving", "failed"):
            for request_id in getattr(finished, name):
                if request_id in self._finished:
                    raise AssertionError(f"request {request_id} was reported as {self._finished[request_id]} and as {name}")
                self._finished[request_id] = name
        return finished

    def wait(self, request_id: str, timeout_s: float = 10, poll_s: float = POLL_S) -> str:
        """ "sending", "recving" or "failed". TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.step()
            if request_id in self._finished:
                return self._finished.pop(request_id)
            if time.monotonic() > deadline:
                raise TimeoutError(f"request {request_id} did not finish within {timeout_s} s")
            with contextlib.suppress(Empty):
                self._told.get(timeout=poll_s)

    def sleep(self) -> SleepReport:
        try:
            return self.memory.sleep({"kv_cache": "discard"})
        finally:
            self.publish()

    def wake(self) -> WakeReport:
        try:
            return self.memory.wake(["kv_cache"])
        finally:
            self.memory.mark_valid("kv_cache")
            self.publish()

    def set_weights_version(self, version: str) -> None:
        """What an engine does whose weights were updated. The KV cache sleeps."""
        self.worker.set_weights_version(version)
        self.scheduler.set_weights_version(version)

    def publish(self) -> None:
        """The worker side's metadata to the scheduler side, as the engine does after every sleep and wake."""
        self.scheduler.set_kv_metadata(self.worker.get_handshake_metadata())

    # ---- what is in the cache ----------------------------------------------------------------------------------------------

    def write_block(self, block: int, content: bytes) -> None:
        arrays = np.frombuffer(content, dtype=np.uint8).reshape(self.spec.num_layers, 2, -1)
        for layer, tensor in enumerate(self.kv_caches.values()):
            for half in (0, 1):
                tensor[half, block].view(torch.uint8).reshape(-1).copy_(torch.from_numpy(arrays[layer, half].copy()))

    def block(self, block: int) -> bytes:
        """K and V of every layer, one after another."""
        return b"".join(
            tensor[half, block].cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for tensor in self.kv_caches.values()
            for half in (0, 1)
        )

    def has(self, prompt: Sequence[int], block_ids: Sequence[int]) -> bool:
        """Whether these blocks hold the prompt's KV, byte for byte."""
        return all(self.block(block) == expected(self.spec, prompt, index) for index, block in enumerate(block_ids))

    # ---- end ---------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._unsubscribe()
        if "worker" in self.__dict__:
            self.worker.shutdown()
        self.kv_caches.clear()
        self.memory.close()

    def __enter__(self) -> KVEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _nothing() -> None:
    return


def _zero(kv_caches: dict[str, torch.Tensor]) -> None:
    """In a frame of its own: an error of the constructor keeps that one's, and a tensor in it would keep the device."""
    for tensor in kv_caches.values():
        tensor.zero_()


def expected(spec: KVCacheSpec, prompt: Sequence[int], index: int) -> bytes:
    """The bytes of block ``index`` of a prompt: different for every prompt, block, layer and half."""
    seed = abs(hash((tuple(prompt), index))) % (1 << 32)
    generator = np.random.default_rng(seed)
    return generator.bytes(2 * spec.num_layers * spec.block_bytes)


def _request(request_id: str, prompt: Sequence[int], params: dict[str, Any]) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt if isinstance(prompt, list) else list(prompt),
        sampling=SamplingParams(max_tokens=1),
        kv_transfer_params=params,
    )
