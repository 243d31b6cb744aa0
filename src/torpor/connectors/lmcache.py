"""``lmcache``: KV of finished prompts is kept by LMCache, in host memory of this process and, with ``remote_url``, where other
engines find it too (an ``lm://`` server, a folder by ``fs://``).

LMCache takes its buffer while the KV cache is registered, outside every pool: it never sleeps (E1), and what is in it survives
sleeps. Nothing of the KV cache is registered with LMCache: it is handed the tensors for one copy at a time, and a release waits
for copies under way. Names are those of ``offload``: other weights or another layout find nothing.

With a remote, every new prompt is asked for there when its request begins, and the step loop waits for the answer, on an ``lm://``
server ``remote_timeout_s`` at most. What a remote gives back is believed when its seal is right (``lmcache_chunks``), which shows
damage, not malice: whoever reaches that server can read and replace what is in it. A trusted network only.

With ``pd_peer``, LMCache's P/D mode instead (``lmcache_pd``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from torpor.connectors.base import FindsBy, KVConnector, KVConnectorScheduler, KVConnectorWorker, Reach, StoreStats
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.lmcache_engine import Engine, load_package
from torpor.connectors.lmcache_options import LMCacheOptions
from torpor.connectors.store import Fetch, Save, Store, StoreScheduler, shared_store
from torpor.connectors.store_names import Names, block_bytes_of
from torpor.connectors.store_worker import StoreWorker
from torpor.errors import BugError, ConfigurationError, TransportError
from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory

logger = logging.getLogger(__name__)


class LMCacheStore(Store):
    name: ClassVar[str] = "lmcache"

    def __init__(self, config: ConnectorConfig, spec: KVCacheSpec) -> None:
        super().__init__(spec.model_id)
        self._engine_id = str(config.engine_id)
        self._options = LMCacheOptions.of(config)
        self._spec = spec
        self._names = Names(spec.model_id, spec)
        if self._options.host_bytes < 2 * block_bytes_of(spec):
            raise ConfigurationError(
                f"host_bytes is {self._options.host_bytes}: there must be room for two blocks of {block_bytes_of(spec)} bytes",
                setting="host_bytes",
                value=self._options.host_bytes,
            )
        self._engine: Engine | None = None
        self._failing = False
        self._saved = self._loaded = self._skipped = 0

    @property
    def path(self) -> str:
        where = f" and {self._options.remote_url}" if self._options.remote_url else ""
        return f"LMCache in host memory ({self._options.host_bytes / 2**20:.0f} MiB){where}"

    def open(self, kv_caches: dict[str, torch.Tensor], memory: Memory) -> None:
        load_package()
        name, options = f"torpor-{self._engine_id}", self._options
        self._engine = Engine(name, self._spec, kv_caches, memory.device, options.host_bytes, options.remote)

    def held_tokens(self, token_ids: Sequence[int]) -> int:
        try:
            held = self._live_engine.lookup(self._names.asked(token_ids))
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
        names = self._names.of(save.token_ids)
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
        arrived = self._live_engine.retrieve(self._names.of(fetch.token_ids), fetch.first_block, fetch.block_ids)
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
        self.version = version
        self._names.use(version)
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
    """Registered as ``lmcache``. Options in ``extra``: those of ``LMCacheOptions``."""

    supports_sleep_mode: ClassVar[bool] = True
    supports_weight_updates: ClassVar[bool] = True
    guarded: ClassVar[bool] = False
    reach: ClassVar[Reach] = "engine"
    finds_by: ClassVar[FindsBy] = "tokens"

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        options = LMCacheOptions.of(config)
        if options.peer is not None:
            from torpor.connectors.lmcache_pd import PairLMCacheConnector

            return PairLMCacheConnector.configured(config)
        return SharedLMCacheConnector if options.remote is not None else LMCacheConnector

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
