"""The scheduler side of ``multi``: who reads, who could, and who may let go."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from torpor.connectors.base import ConnectorMetadata, KVConnectorScheduler, LoadRequest
from torpor.connectors.multi_config import Child
from torpor.connectors.params import wants
from torpor.errors import RequestError
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.request import GenerationRequest

PARTS = "torpor_children"  # in kv_transfer_params: those of each child, by label
MAX_CHOICES = 4096  # requests that were asked about and have no blocks yet


class Spare(NamedTuple):
    """A child that has the KV of a load which another one was asked for, and what it would be asked."""

    child: int
    load: LoadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiMetadata(ConnectorMetadata):
    children: tuple[ConnectorMetadata, ...] = ()
    kept: dict[str, int] = field(default_factory=dict)  # hand-offs, and how many children keep the blocks
    spares: dict[str, list[Spare]] = field(default_factory=dict)  # of loads that begin now: who has the same KV, in order

    def __bool__(self) -> bool:
        return bool(self.kept or self.spares) or any(self.children)


class MultiScheduler(KVConnectorScheduler):
    def __init__(self, children: Sequence[Child], spec: KVCacheSpec) -> None:
        self._labels = [child.label for child in children]
        self._children = [child.kind.create_scheduler(child.config, spec) for child in children]
        # Which child has the KV of a request, beyond how many tokens.
        self._choices: OrderedDict[str, tuple[int | None, int]] = OrderedDict()
        self._spared: dict[str, set[int]] = {}  # other children that have it too
        self._kept: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: GenerationRequest, num_computed_tokens: int) -> tuple[int, bool]:
        for index, child in enumerate(self._children):
            found = child.get_num_new_matched_tokens(self._for(index, request), num_computed_tokens)
            if found[0] > 0:
                self._choices[request.request_id] = index, num_computed_tokens
                if len(self._choices) > MAX_CHOICES:
                    self._choices.popitem(last=False)
                return found
        return 0, False

    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        """Of the others, those that have it too are spared until the load has ended; the rest hear that they may let go."""
        chosen, computed = self._choices.pop(request.request_id, (None, 0))
        if chosen is None and num_external_tokens:
            self.get_num_new_matched_tokens(request, 0)
            chosen, computed = self._choices.pop(request.request_id, (None, 0))
        for index, child in enumerate(self._children):
            own = self._for(index, request)
            if index == chosen:
                child.update_state_after_alloc(own, block_ids, num_external_tokens)
            elif num_external_tokens and (found := self._spare_tokens(index, own, computed)) >= num_external_tokens:
                child.update_state_after_alloc(own, block_ids, found)
                self._spared.setdefault(request.request_id, set()).add(index)
            else:
                child.update_state_after_alloc(own, [], 0)

    def _spare_tokens(self, index: int, request: GenerationRequest, num_computed_tokens: int) -> int:
        """What this child has, if its worker can be asked in the middle of a load."""
        child = self._children[index]
        return 0 if isinstance(child, MultiScheduler) else child.get_num_new_matched_tokens(request, num_computed_tokens)[0]

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
        spares: dict[str, list[Spare]] = {}
        parts = [self._without_spares(i, child.build_connector_meta(), spares) for i, child in enumerate(self._children)]
        self._spared.clear()
        return MultiMetadata(children=tuple(parts), kept=kept, spares=spares)

    def _without_spares(self, index: int, part: ConnectorMetadata, spares: dict[str, list[Spare]]) -> ConnectorMetadata:
        """Loads that are begun only if another child's fails go into ``spares``."""
        begun = []
        for load in part.loads:
            if index in self._spared.get(load.request_id, ()):
                spares.setdefault(load.request_id, []).append(Spare(index, load))
            else:
                begun.append(load)
        return dataclasses.replace(part, loads=begun)

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
