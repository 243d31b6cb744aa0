"""What connectors that keep KV themselves have in common (``offload``, ``lmcache``): the scheduler side, and what a store is to
both sides.

The two sides of an engine share one store, found by the engine's id: the scheduler side asks it what it holds, the worker side
moves bytes into and out of it. What the scheduler side ordered lies on the store's desk until the worker side takes it, with the
next step or, if a sleep comes first, with the release: nothing that was finished before a sleep is lost by it.
"""

from __future__ import annotations

import abc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torpor.connectors.base import ConnectorMetadata, KVConnectorScheduler, LoadRequest, StoreStats
from torpor.connectors.config import KV_ROLES, ConnectorConfig
from torpor.errors import BugError, ConfigurationError
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.request import GenerationRequest

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Keep the KV of the full blocks of a prompt: that of ``token_ids[i * block_size:][:block_size]`` is in ``block_ids[i]``."""

    request_id: str
    token_ids: list[int]
    block_ids: list[BlockId]
    epoch: str  # of the mapping that the blocks are of
    version: str  # of the weights the KV was computed with


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Bring the KV of blocks ``first_block`` and those after it of ``token_ids`` into ``block_ids``."""

    request_id: str
    token_ids: list[int]
    first_block: int
    block_ids: list[BlockId]
    version: str
    asked: float  # time.monotonic(), before it waited for its turn


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMetadata(ConnectorMetadata):
    saves: list[Save] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.cancelled)


class Store(abc.ABC):
    """One per engine. ``held_tokens``, ``set_version`` and what the desk needs are the engine thread's and never block; ``save``
    and ``load`` are those of one thread of the worker side; ``stats`` is anybody's."""

    name: ClassVar[str]

    def __init__(self, version: str) -> None:
        self.version = version  # of the weights
        self.closed = False
        self._claimed = False
        self._desk: list[Save] = []
        self._desk_lock = threading.Lock()

    def claim(self) -> None:
        """By the worker side, once. ConfigurationError when another engine of this process has it."""
        if self._claimed:
            raise ConfigurationError(
                "another engine of this process has this kv engine_id: give each engine its own", setting="engine_id", value=None
            )
        self._claimed = True

    def order(self, save: Save) -> None:
        with self._desk_lock:
            self._desk.append(save)

    def take_orders(self) -> list[Save]:
        with self._desk_lock:
            orders, self._desk = self._desk, []
        return orders

    @property
    @abc.abstractmethod
    def path(self) -> str:
        """Where KV is kept, in words."""

    @abc.abstractmethod
    def held_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of the leading tokens' KV is here, in full blocks. It may be gone when it is asked for."""

    @abc.abstractmethod
    def open(self, kv_caches: dict[str, torch.Tensor], memory: Memory) -> None:
        """Once, outside every pool: what it allocates belongs to no tag (E1)."""

    @abc.abstractmethod
    def save(self, save: Save) -> None:
        """Copies blocks out of the KV cache. Returns when the cache is not read any more. TorporError: some are not kept."""

    @abc.abstractmethod
    def load(self, fetch: Fetch, stop: Callable[[], bool]) -> int:
        """Copies blocks into the KV cache; the bytes. TorporError: not all of them arrived, and nothing writes to them any more.
        ``stop``: nobody waits for it any more."""

    @abc.abstractmethod
    def set_version(self, version: str) -> None:
        """KV of other weights is never served again."""

    @abc.abstractmethod
    def stats(self) -> StoreStats: ...

    @abc.abstractmethod
    def close(self, timeout_s: float) -> None:
        """Idempotent. Writes that are under way get ``timeout_s`` to end."""


_stores: weakref.WeakValueDictionary[tuple[str, str], Store] = weakref.WeakValueDictionary()
_stores_lock = threading.Lock()


def shared_store(config: ConnectorConfig, name: str, make: Callable[[], Store]) -> Store:
    """The store of this engine: made by whichever side comes first, gone when both are, or when it was closed."""
    if config.engine_id is None:
        raise BugError("a connector's engine_id is chosen before its sides are made")
    with _stores_lock:
        found = _stores.get((name, config.engine_id))
        if found is None or found.closed:
            found = _stores[name, config.engine_id] = make()
        return found


class StoreScheduler(KVConnectorScheduler):
    """Every prompt is looked up when its request begins, and kept when it ends. A ``producer`` only keeps, a ``consumer`` only
    looks up."""

    def __init__(self, config: ConnectorConfig, spec: KVCacheSpec, store: Store) -> None:
        if config.role not in KV_ROLES:
            raise ConfigurationError(
                f"kv_role {config.role!r} is none of {', '.join(KV_ROLES)}", setting="kv_role", value=config.role
            )
        self._spec = spec
        self._store = store
        self._looks_up = config.role != "producer"
        self._keeps = config.role != "consumer"
        self._epoch: str | None = None
        self._ends: dict[str, int] = {}  # token up to which the store was said to have a request's prompt
        self._loads: list[LoadRequest] = []
        self._cancelled: list[str] = []

    def set_kv_metadata(self, metadata: dict[str, Any] | None) -> None:
        self._epoch = None if metadata is None else metadata["epoch"]

    def set_weights_version(self, version: str) -> None:
        self._store.set_version(version)

    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        """What they ask for is a transfer between engines: the business of others beside this one (``multi``), or nobody's."""

    def get_num_new_matched_tokens(self, request: GenerationRequest, num_computed_tokens: int) -> tuple[int, bool]:
        # The last token of the prompt is computed here, to sample from.
        full = self._full_blocks(len(request.prompt_token_ids) - 1)
        if not self._looks_up or full <= num_computed_tokens:
            return 0, False
        held = self._held(request, full)
        if held <= num_computed_tokens:
            return 0, False
        self._ends[request.request_id] = held
        return held - num_computed_tokens, True

    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        end = self._ends.pop(request.request_id, 0)
        if num_external_tokens == 0:
            return
        first = (end - num_external_tokens) // self._spec.block_size
        end = (first + len(block_ids)) * self._spec.block_size  # as far as there are blocks for it
        fetch = {"token_ids": request.prompt_token_ids[:end], "version": self._store.version}
        self._loads.append(
            LoadRequest(request_id=request.request_id, local_block_ids=list(block_ids), params=fetch, first_block=first)
        )

    def request_finished(
        self, request: GenerationRequest, block_ids: list[BlockId], num_computed_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        # Only the prompt's KV: what was generated is known to nobody on this side.
        full = self._full_blocks(min(num_computed_tokens, len(request.prompt_token_ids)))
        if not self._keeps or full == 0 or self._epoch is None:
            return False, None
        tokens = request.prompt_token_ids[:full]
        if self._store.held_tokens(tokens) == full:
            return False, None
        blocks = block_ids[: full // self._spec.block_size]
        self._store.order(
            Save(
                request_id=request.request_id,
                token_ids=tokens,
                block_ids=blocks,
                epoch=self._epoch,
                version=self._store.version,
            )
        )
        return True, None

    def cancel_load(self, request_id: str) -> None:
        self._cancelled.append(request_id)

    def build_connector_meta(self) -> ConnectorMetadata:
        metadata = StoreMetadata(loads=self._loads, cancelled=self._cancelled, saves=self._store.take_orders())
        self._loads, self._cancelled = [], []
        return metadata

    def _held(self, request: GenerationRequest, num_tokens: int) -> int:
        """How many of the prompt's first ``num_tokens`` tokens the store has."""
        return self._store.held_tokens(request.prompt_token_ids[:num_tokens])

    def _full_blocks(self, num_tokens: int) -> int:
        """Tokens of the full blocks among the first ``num_tokens``."""
        return num_tokens // self._spec.block_size * self._spec.block_size
