"""``lmcache``: KV of finished prompts is kept by LMCache, in host memory of this process and, with ``remote_url``, where other
engines find it too (an ``lm://`` server, a folder by ``fs://``).

LMCache takes its buffer while the KV cache is registered, outside every pool: it never sleeps (E1), and what is in it survives
sleeps. Nothing of the KV cache is registered with LMCache: it is handed the tensors for one copy at a time, and a release waits
for copies under way. Names are those of ``offload``: other weights or another layout find nothing.

With a remote, every new prompt is asked for there when its request begins, and the step loop waits for the answer
(LMCache's ``blocking_timeout_secs``, 10). Whoever reaches that server can read and replace what is in it: a trusted network only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torpor.connectors.base import FindsBy, KVConnector, KVConnectorScheduler, KVConnectorWorker, Reach, StoreStats
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.lmcache_engine import Engine, load_package
from torpor.connectors.offload import block_bytes_of, root_of
from torpor.connectors.options import read_options
from torpor.connectors.store import Fetch, Save, Store, StoreScheduler, shared_store
from torpor.connectors.store_worker import StoreWorker
from torpor.errors import BugError, ConfigurationError, TransportError
from torpor.kvcache.prefix import HashChain
from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory

logger = logging.getLogger(__name__)

OPTIONS = {"host_bytes", "remote_url"}
SCHEMES = ("lm://", "fs://")


@dataclass(frozen=True, kw_only=True)
class LMCacheOptions:
    host_bytes: int = 1 << 30
    remote_url: str | None = None  # None: this process alone

    @classmethod
    def of(cls, config: ConnectorConfig) -> LMCacheOptions:
        options = read_options(cls, config, OPTIONS)
        if options.remote_url is not None and not options.remote_url.startswith(SCHEMES):
            raise ConfigurationError(
                f"remote_url {options.remote_url!r} must begin with one of {', '.join(SCHEMES)}",
                setting="remote_url",
                value=options.remote_url,
            )
        return options


class LMCacheStore(Store):
    name: ClassVar[str] = "lmcache"

    def __init__(self, config: ConnectorConfig, spec: KVCacheSpec) -> None:
        super().__init__(spec.model_id)
        self._engine_id = str(config.engine_id)
        self._options = LMCacheOptions.of(config)
        self._spec = spec
        self._root = root_of(spec.model_id, spec)
        if self._options.host_bytes < 2 * block_bytes_of(spec):
            raise ConfigurationError(
                f"host_bytes is {self._options.host_bytes}: there must be room for two blocks of {block_bytes_of(spec)} bytes",
                setting="host_bytes",
                value=self._options.host_bytes,
            )
        self._engine: Engine | None = None
        self._last: tuple[bytes, Sequence[int], list[bytes]] = (b"", (), [])
        self._failing = False
        self._saved = self._loaded = self._skipped = 0

    @property
    def path(self) -> str:
        where = f" and {self._options.remote_url}" if self._options.remote_url else ""
        return f"LMCache in host memory ({self._options.host_bytes / 2**20:.0f} MiB){where}"

    def open(self, kv_caches: dict[str, torch.Tensor], memory: Memory) -> None:
        load_package()
        self._engine = Engine(
            f"torpor-{self._engine_id}", self._spec, kv_caches, self._options.host_bytes, self._options.remote_url
        )

    def names(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of the full blocks of a text, in order."""
        size = self._spec.block_size
        return list(HashChain().extend(self._root, token_ids, size, len(token_ids) // size))

    def held_tokens(self, token_ids: Sequence[int]) -> int:
        root, tokens, names = self._last
        if root != self._root or tokens != token_ids:
            names = self.names(token_ids)
            self._last = (self._root, token_ids, names)
        try:
            held = self._live_engine.lookup(names)
        except TransportError as error:
            self._tell(error)
            return 0
        self._failing = False
        return held * self._spec.block_size

    def _tell(self, error: TransportError) -> None:
        """Once, when it begins: prompts are computed meanwhile."""
        if not self._failing:
            self._failing = True
            logger.error("prompts are not looked up: %s", error)

    def save(self, save: Save) -> None:
        names = self.names(save.token_ids)
        if save.version != self.version:
            return
        engine = self._live_engine
        before = engine.lookup(names)
        engine.store(names, save.block_ids)
        held = engine.lookup(names)
        self._saved += max(0, held - before)
        self._skipped += len(names) - held

    def load(self, fetch: Fetch, stop: Callable[[], bool]) -> int:
        if stop() or fetch.version != self.version:
            raise TransportError("nobody waits for it any more, or the weights have changed", transport=self.name)
        arrived = self._live_engine.retrieve(self.names(fetch.token_ids), fetch.first_block, fetch.block_ids)
        if arrived != len(fetch.block_ids):
            raise TransportError(f"{arrived} of {len(fetch.block_ids)} blocks arrived", transport=self.name)
        if fetch.version != self.version:
            raise TransportError("the weights have changed meanwhile", transport=self.name)
        self._loaded += arrived
        return arrived * block_bytes_of(self._spec)

    def set_version(self, version: str) -> None:
        """Nothing has an old name any more; if LMCache does not give the memory back, it falls out in time."""
        if version == self.version:
            return
        self.version, self._root = version, root_of(version, self._spec)
        try:
            self._live_engine.clear_local()
        except TransportError as error:
            logger.warning("%s", error)

    def stats(self) -> StoreStats:
        return StoreStats(
            host_limit_bytes=self._options.host_bytes,
            saved_blocks=self._saved,
            loaded_blocks=self._loaded,
            skipped_blocks=self._skipped,
        )

    def close(self, timeout_s: float) -> None:
        self.closed = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise BugError("LMCache is asked before open() or after close()")
        return self._engine


class LMCacheConnector(KVConnector):
    """Registered as ``lmcache``. Options in ``extra``: ``host_bytes``, ``remote_url``."""

    supports_sleep_mode: ClassVar[bool] = True
    supports_weight_updates: ClassVar[bool] = True
    guarded: ClassVar[bool] = False
    reach: ClassVar[Reach] = "engine"
    finds_by: ClassVar[FindsBy] = "tokens"

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        return SharedLMCacheConnector if LMCacheOptions.of(config).remote_url else LMCacheConnector

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return StoreScheduler(config, spec, _store(config, spec))

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        return StoreWorker(config, spec, _store(config, spec))


class SharedLMCacheConnector(LMCacheConnector):
    """With a remote: engines of other processes find what this one kept."""

    reach: ClassVar[Reach] = "processes"


def _store(config: ConnectorConfig, spec: KVCacheSpec) -> Store:
    return shared_store(config, LMCacheStore.name, lambda: LMCacheStore(config, spec))
