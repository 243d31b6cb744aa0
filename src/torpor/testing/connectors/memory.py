"""A KV connector for one process: no sockets, no transport, no threads. Hand-offs are copied to a shelf that all engines of the
process share, and taken from there. It allocates a buffer while it registers, as real ones do, and can be told to fail.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any, ClassVar

from torpor.connectors import params as kv_params
from torpor.connectors.base import (
    ConnectorMetadata,
    ConnectorStats,
    Finished,
    KVConnector,
    KVConnectorScheduler,
    KVConnectorWorker,
    LoadRequest,
    Reach,
)
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.scheduler import PullScheduler
from torpor.errors import RequestError, StateError, TransportError
from torpor.kvcache.types import Epoch, KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory

BUFFER_BYTES = 1 << 20

_Key = tuple[KVCacheSpec, str, int, bytes]  # layout and model, epoch, lease, digest of the tokens


class MemoryConnectorWorker(KVConnectorWorker):
    """``fail_release`` and ``fail_restore`` count how many of the next calls raise TransportError."""

    shelf: ClassVar[dict[_Key, torch.Tensor]] = {}

    def __init__(self, config: ConnectorConfig, spec: KVCacheSpec) -> None:
        self.engine_id = config.engine_id or secrets.token_hex(8)
        self.fail_release = int(config.extra.get("fail_release", 0))
        self.fail_restore = int(config.extra.get("fail_restore", 0))
        self.buffer: torch.Tensor | None = None  # what it allocated while registering: outside every pool (E1)
        self.kv_caches: dict[str, torch.Tensor] = {}
        self._layout = dataclasses.replace(spec, num_blocks=0)  # that may differ between engines
        self._epoch = Epoch.first()
        self._registered = False
        self._keys: list[_Key] = []
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._counts = {"done": 0, "failed": 0, "bytes": 0}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec, memory: Memory) -> None:
        import torch

        device = next(iter(kv_caches.values())).device
        self.buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)
        self.kv_caches = dict(kv_caches)
        self._registered = True

    def set_weights_version(self, version: str) -> None:
        self._layout = dataclasses.replace(self._layout, model_id=version)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        if not self._registered:
            raise StateError("the KV cache is released", state="released")
        for hand_off in metadata.hand_offs:
            self._sent.add(hand_off.request_id)
            if hand_off.epoch != str(self._epoch):
                continue
            key = (self._layout, hand_off.epoch, hand_off.lease, hand_off.digest)
            self.shelf[key] = self._stacked()[:, :, list(hand_off.block_ids)].clone()
            self._keys.append(key)
        for load in metadata.loads:
            arrived = self._load(load)
            if load.local_block_ids:
                (self._received if arrived else self._failed).add(load.request_id)

    def _load(self, load: LoadRequest) -> bool:
        try:
            parsed = kv_params.parse(load.params)
        except RequestError:
            return False
        found = self.shelf.pop((self._layout, parsed.torpor.epoch, parsed.torpor.lease, load.digest), None)
        last = load.first_block + len(load.local_block_ids)
        if found is None or last > found.shape[2]:
            return False
        for layer, tensor in enumerate(self.kv_caches.values()):
            tensor[:, list(load.local_block_ids)] = found[layer, :, load.first_block : last]
        self._counts["bytes"] += found[:, :, load.first_block : last].nbytes
        return True

    def _stacked(self) -> torch.Tensor:
        import torch

        return torch.stack(list(self.kv_caches.values()))

    def get_finished(self) -> Finished:
        finished = Finished(sending=frozenset(self._sent), recving=frozenset(self._received), failed=frozenset(self._failed))
        self._counts["done"] += len(self._received)
        self._counts["failed"] += len(self._failed)
        self._sent, self._received, self._failed = set(), set(), set()
        return finished

    def release_kv_caches(self) -> None:
        if self.fail_release > 0:
            self.fail_release -= 1
            raise TransportError("release_kv_caches was told to fail", transport="memory")
        self._forget()
        self._registered = False

    def restore_kv_caches(self) -> None:
        if self.fail_restore > 0:
            self.fail_restore -= 1
            raise TransportError("restore_kv_caches was told to fail", transport="memory")
        if not self._registered:
            self._epoch = self._epoch.next()
            self._registered = True

    def get_handshake_metadata(self) -> dict[str, Any] | None:
        return (
            {"engine_id": self.engine_id, "epoch": str(self._epoch), "host": "localhost", "port": 0} if self._registered else None
        )

    def epoch(self) -> Epoch | None:
        return self._epoch if self._registered else None

    def stats(self) -> ConnectorStats:
        return ConnectorStats(
            connector="memory",
            engine_id=self.engine_id,
            path="a shelf of this process",
            epoch=str(self._epoch) if self._registered else None,
            registered_bytes=sum(t.nbytes for t in self.kv_caches.values()) if self._registered else 0,
            pending_hand_offs=0,
            loads_in_flight=0,
            loads_done=self._counts["done"],
            loads_failed=self._counts["failed"],
            bytes_received=self._counts["bytes"],
        )

    def _forget(self) -> None:
        """What was handed off under this epoch is nobody's to read any more (P1)."""
        while self._keys:
            self.shelf.pop(self._keys.pop(), None)

    def shutdown(self) -> None:
        self._forget()
        self._registered = False
        self.buffer = None
        self.kv_caches = {}


class MemoryConnector(KVConnector):
    """``extra``: ``fail_release``, ``fail_restore`` (counts)."""

    supports_sleep_mode: ClassVar[bool] = True
    supports_weight_updates: ClassVar[bool] = True
    reach: ClassVar[Reach] = "process"

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return PullScheduler(config, spec)

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        return MemoryConnectorWorker(config, spec)


class UnsupportedConnector(MemoryConnector):
    """The same, but it does not say that it can follow the KV cache's mapping: refused where sleep mode is on (E4)."""

    supports_sleep_mode: ClassVar[bool] = False
