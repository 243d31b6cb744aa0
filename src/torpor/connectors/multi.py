"""``multi``: several connectors in order. A load comes from the first that has the KV, and from the next that has it if it fails;
a prefill is handed to all.

It sleeps only if every child does (E4). A release goes from the last child to the first, so that what a child sees pinned is its
own or of children before it; if one fails, those that had released are restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torpor.connectors.base import FindsBy, KVConnector, KVConnectorScheduler, KVConnectorWorker, Reach, works_by_layer
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.multi_config import children_of
from torpor.connectors.multi_scheduler import MultiScheduler
from torpor.connectors.multi_worker import LayeredMultiWorker, MultiWorker
from torpor.kvcache.types import KVCacheSpec

REACHES: tuple[Reach, ...] = ("engine", "process", "processes")


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
