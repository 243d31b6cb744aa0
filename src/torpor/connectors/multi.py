"""``multi``: several connectors in order. A load comes from the first that has the KV; a prefill is handed to all.

It sleeps only if every child does (E4). A release goes from the last child to the first, so that what a child sees pinned is its
own or of children before it; if one fails, those that had released are restored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from torpor.connectors.base import (
    ConnectorMetadata,
    ConnectorStats,
    FindsBy,
    Finished,
    KVConnector,
    KVConnectorScheduler,
    KVConnectorWorker,
    Reach,
    works_by_layer,
)
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.multi_config import Child, children_of, of_child
from torpor.connectors.params import wants
from torpor.errors import RequestError, StateError, TorporError
from torpor.kvcache.types import BlockId, Epoch, KVCacheSpec
from torpor.request import GenerationRequest

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory

PARTS = "torpor_children"  # in kv_transfer_params: those of each child, by label
REACHES: tuple[Reach, ...] = ("engine", "process", "processes")
MAX_CHOICES = 4096  # requests that were asked about and have no blocks yet


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiMetadata(ConnectorMetadata):
    children: tuple[ConnectorMetadata, ...] = ()
    kept: dict[str, int] = field(default_factory=dict)  # hand-offs, and how many children keep the blocks

    def __bool__(self) -> bool:
        return bool(self.kept) or any(self.children)


class MultiScheduler(KVConnectorScheduler):
    def __init__(self, children: Sequence[Child], spec: KVCacheSpec) -> None:
        self._labels = [child.label for child in children]
        self._children = [child.kind.create_scheduler(child.config, spec) for child in children]
        self._choices: OrderedDict[str, int] = OrderedDict()  # which child has the KV of a request
        self._kept: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: GenerationRequest, num_computed_tokens: int) -> tuple[int, bool]:
        for index, child in enumerate(self._children):
            found = child.get_num_new_matched_tokens(self._for(index, request), num_computed_tokens)
            if found[0] > 0:
                self._choices[request.request_id] = index
                if len(self._choices) > MAX_CHOICES:
                    self._choices.popitem(last=False)
                return found
        return 0, False

    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        """The others hear that they may let go."""
        chosen = self._choices.pop(request.request_id, None)
        if chosen is None and num_external_tokens:
            self.get_num_new_matched_tokens(request, 0)
            chosen = self._choices.pop(request.request_id, None)
        for index, child in enumerate(self._children):
            if index == chosen:
                child.update_state_after_alloc(self._for(index, request), block_ids, num_external_tokens)
            else:
                child.update_state_after_alloc(self._for(index, request), [], 0)

    def request_finished(
        self, request: GenerationRequest, block_ids: list[BlockId], num_computed_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        parts: dict[str, dict[str, Any]] = {}
        kept = 0
        for index, child in enumerate(self._children):
            keeps, params = child.request_finished(self._for(index, request), list(block_ids), num_computed_tokens)
            kept += keeps
            if params is not None:
                parts[self._labels[index]] = params
        if kept:
            self._kept[request.request_id] = kept
        # A peer with the first child alone finds what it knows where it is used to.
        return kept > 0, {**next(iter(parts.values())), PARTS: parts} if parts else None

    def cancel_load(self, request_id: str) -> None:
        for child in self._children:
            child.cancel_load(request_id)

    def build_connector_meta(self) -> MultiMetadata:
        kept, self._kept = self._kept, {}
        return MultiMetadata(children=tuple(child.build_connector_meta() for child in self._children), kept=kept)

    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        parts = params.get(PARTS, {})
        if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
            raise RequestError(f"kv_transfer_params.{PARTS} must hold one object per child", param=f"kv_transfer_params.{PARTS}")
        if wants(params, "do_remote_prefill") and parts and not set(parts) & set(self._labels):
            raise RequestError(
                f"kv_transfer_params.{PARTS} is of {', '.join(map(str, parts))}; this engine has {', '.join(self._labels)}",
                param=f"kv_transfer_params.{PARTS}",
            )
        for index, child in enumerate(self._children):
            child.check_params(self._part(index, params) or {}, num_prompt_tokens)

    def set_kv_metadata(self, metadata: dict[str, Any] | None) -> None:
        for index, child in enumerate(self._children):
            child.set_kv_metadata(None if metadata is None else metadata["children"][index])

    def set_weights_version(self, version: str) -> None:
        for child in self._children:
            child.set_weights_version(version)

    def _for(self, index: int, request: GenerationRequest) -> GenerationRequest:
        """The request as this child would get it by itself."""
        params = request.kv_transfer_params
        if params is None:
            return request
        return msgspec.structs.replace(request, kv_transfer_params=self._part(index, params))

    def _part(self, index: int, params: dict[str, Any]) -> dict[str, Any] | None:
        """What asks for a hand-off is for all. What a peer handed over is each child's own, and the first one's where it does not
        say."""
        if PARTS in params:
            part: dict[str, Any] | None = params[PARTS].get(self._labels[index])
            return part
        return None if index and wants(params, "do_remote_prefill") else params


class MultiWorker(KVConnectorWorker):
    def __init__(self, config: ConnectorConfig, children: Sequence[Child], spec: KVCacheSpec) -> None:
        self._engine_id = str(config.engine_id)
        self._labels = [child.label for child in children]
        self._children = [child.kind.create_worker(child.config, spec) for child in children]
        self._kept: dict[str, int] = {}  # hand-offs that so many children have not ended yet

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

    def set_weights_version(self, version: str) -> None:
        for child in self._children:
            child.set_weights_version(version)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        if not isinstance(metadata, MultiMetadata):
            raise StateError("metadata of another connector", state="any")
        self._kept.update(metadata.kept)
        for child, part in zip(self._children, metadata.children, strict=True):
            if part:
                child.start_load_kv(part)

    def get_finished(self) -> Finished:
        found = [child.get_finished() for child in self._children]
        return Finished(
            sending=frozenset(name for part in found for name in sorted(part.sending) if self._was_last(name)),
            recving=frozenset(name for part in found for name in part.recving),
            failed=frozenset(name for part in found for name in part.failed),
        )

    def _was_last(self, request_id: str) -> bool:
        """Whether no other child keeps the blocks of this hand-off."""
        left = self._kept.pop(request_id, 1) - 1
        if left:
            self._kept[request_id] = left
        return not left

    def release_kv_caches(self) -> None:
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


class MultiConnector(KVConnector):
    """Registered as ``multi``. ``extra``: ``connectors``, see ``children_of``. Both ends of a pair name the same children."""

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        kinds = tuple(child.kind for child in children_of(config))

        class Configured(cls):  # type: ignore[valid-type, misc]
            supports_sleep_mode: ClassVar[bool] = all(kind.supports_sleep_mode for kind in kinds)
            supports_weight_updates: ClassVar[bool] = all(kind.supports_weight_updates for kind in kinds)
            guarded: ClassVar[bool] = any(kind.guarded for kind in kinds)
            reach: ClassVar[Reach] = _reach(kinds)
            children: ClassVar[tuple[type[KVConnector], ...]] = kinds
            finds_by: ClassVar[FindsBy] = "tokens" if all(kind.finds_by == "tokens" for kind in kinds) else "params"

        return Configured

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return MultiScheduler(children_of(config), spec)

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        children = children_of(config)
        worker = MultiWorker(config, children, spec)
        layered = any(works_by_layer(child) for child in worker._children)
        return LayeredMultiWorker(config, children, spec) if layered else worker


def _reach(kinds: Sequence[type[KVConnector]]) -> Reach:
    """That of the first child that is sent params, which a read goes by; one that looks for tokens only comes before it."""
    by_params = [kind.reach for kind in kinds if kind.finds_by == "params"]
    return by_params[0] if by_params else max((kind.reach for kind in kinds), key=REACHES.index)
