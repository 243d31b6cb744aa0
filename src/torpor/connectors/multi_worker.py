"""The worker side of ``multi``: it sleeps and wakes as one, and a load that failed is asked of the next that has the KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from torpor.connectors.base import ConnectorMetadata, ConnectorStats, Finished, KVConnectorWorker
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.multi_config import Child, of_child
from torpor.connectors.multi_scheduler import MultiMetadata, Spare
from torpor.errors import StateError, TorporError
from torpor.kvcache.types import Epoch, KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory

logger = logging.getLogger(__name__)


class MultiWorker(KVConnectorWorker):
    def __init__(self, config: ConnectorConfig, children: Sequence[Child], spec: KVCacheSpec) -> None:
        self._engine_id = str(config.engine_id)
        self._labels = [child.label for child in children]
        self._children = [child.kind.create_worker(child.config, spec) for child in children]
        self._kept: dict[str, int] = {}  # hand-offs that so many children have not ended yet
        self._spares: dict[str, list[Spare]] = {}  # of loads under way: who else has the KV

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec, memory: Memory) -> None:
        for label, child in zip(self._labels, self._children, strict=True):
            try:
                child.register_kv_caches(kv_caches, spec, memory)
            except TorporError as error:
                self.shutdown()
                raise of_child(error, label) from error.__cause__
            except BaseException:
                self.shutdown()
                raise

    def tell_when_finished(self, tell: Callable[[], None]) -> None:
        for child in self._children:
            child.tell_when_finished(tell)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        if not isinstance(metadata, MultiMetadata):
            raise StateError("metadata of another connector", state="any")
        self._kept.update(metadata.kept)
        self._spares.update(metadata.spares)
        for part in metadata.children:
            for name in part.cancelled:
                self._spare(name)
        for child, part in zip(self._children, metadata.children, strict=True):
            if part:
                child.start_load_kv(part)

    def get_finished(self) -> Finished:
        found = [child.get_finished() for child in self._children]
        recving = frozenset(name for part in found for name in part.recving)
        for name in recving:
            self._spare(name)
        return Finished(
            sending=frozenset(name for part in found for name in sorted(part.sending) if self._was_last(name)),
            recving=recving,
            failed=frozenset(name for part in found for name in part.failed if not self._next_is_asked(name)),
        )

    def _next_is_asked(self, request_id: str) -> bool:
        """For the KV of a load that has failed: nothing of that one writes to the blocks any more."""
        spares = self._spares.get(request_id)
        if not spares:
            self._spares.pop(request_id, None)
            return False
        index, load = spares.pop(0)
        logger.info("the KV of request %s is asked of %s now", request_id, self._labels[index])
        self._children[index].start_load_kv(ConnectorMetadata(loads=[load]))
        return True

    def _spare(self, request_id: str) -> None:
        """Its load needs nobody else any more: they may let go."""
        for index, load in self._spares.pop(request_id, ()):
            self._children[index].start_load_kv(ConnectorMetadata(loads=[msgspec.structs.replace(load, local_block_ids=[])]))

    def _was_last(self, request_id: str) -> bool:
        """Whether no other child keeps the blocks of this hand-off."""
        left = self._kept.pop(request_id, 1) - 1
        if left:
            self._kept[request_id] = left
        return not left

    def release_kv_caches(self) -> None:
        for name in list(self._spares):  # the load ends with the memory that it is for
            self._spare(name)
        released: list[int] = []
        for index in reversed(range(len(self._children))):
            try:
                self._children[index].release_kv_caches()
            except TorporError as error:
                undone = self._restore(reversed(released))
                error.fields["undo_failures"] = (*error.fields.get("undo_failures", ()), *undone)
                raise of_child(error, self._labels[index]) from error.__cause__
            released.append(index)

    def _restore(self, indices: Any) -> tuple[str, ...]:
        """What kept those from coming back, if anything did: the next wake tries again."""
        failures = []
        for index in indices:
            try:
                self._children[index].restore_kv_caches()
            except TorporError as error:
                failures.append(f"{self._labels[index]}: {error}")
        return tuple(failures)

    def restore_kv_caches(self) -> None:
        for label, child in zip(self._labels, self._children, strict=True):
            try:
                child.restore_kv_caches()
            except TorporError as error:
                raise of_child(error, label) from error.__cause__

    def set_weights_version(self, version: str) -> None:
        for child in self._children:
            child.set_weights_version(version)

    def get_handshake_metadata(self) -> dict[str, Any] | None:
        parts = [child.get_handshake_metadata() for child in self._children]
        epoch = self.epoch()
        if epoch is None or any(part is None for part in parts):
            return None
        return {"engine_id": self._engine_id, "epoch": str(epoch), "children": parts}

    def epoch(self) -> Epoch | None:
        """The first child's, while all are registered."""
        epochs = [child.epoch() for child in self._children]
        return None if None in epochs else epochs[0]

    def stats(self) -> ConnectorStats:
        parts = [child.stats() for child in self._children]
        epoch = self.epoch()
        return ConnectorStats(
            connector="multi",
            engine_id=self._engine_id,
            path="; ".join(f"{label}: {part.path}" for label, part in zip(self._labels, parts, strict=True)),
            epoch=None if epoch is None else str(epoch),
            registered_bytes=sum(part.registered_bytes for part in parts),
            pending_hand_offs=max(part.pending_hand_offs for part in parts),
            loads_in_flight=sum(part.loads_in_flight for part in parts),
            loads_done=sum(part.loads_done for part in parts),
            loads_failed=sum(part.loads_failed for part in parts),
            bytes_received=sum(part.bytes_received for part in parts),
            peers=tuple(peer for part in parts for peer in part.peers),
            release_s=sum(part.release_s for part in parts),
            restore_s=sum(part.restore_s for part in parts),
            children=tuple(parts),
        )

    def shutdown(self) -> None:
        for child in reversed(self._children):
            child.shutdown()


class LayeredMultiWorker(MultiWorker):
    """For children that work inside the forward pass: a runner asks only those that say so."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self._children:
            child.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        for child in self._children:
            child.save_kv_layer(layer_name, kv_layer)

    def wait_for_save(self) -> None:
        for child in self._children:
            child.wait_for_save()
