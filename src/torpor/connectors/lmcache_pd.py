"""``lmcache`` with ``pd_peer``: LMCache's P/D mode. A prefill engine pushes the KV of a prompt that has ``do_remote_decode``
into the staging buffer of the decode engine, which takes it from there when the request comes to it.

Both staging buffers are LMCache's, taken while the KV cache is registered, outside every pool: they never sleep (E1), and are all
that is known to NIXL. So a sleep of either end concerns no peer. Of the KV cache there are copies under way inside it, for
which a release waits. What is pushed lies under the names of ``store_names``: other weights or another layout find nothing.

The prefill's answer comes before its KV does. It says how much will come; the decode engine waits for that, for ``pd_wait_s`` at
most, and computes what did not come. LMCache's ports ask for no proof: whoever reaches them can write into a decode engine's
staging buffer, where chunks prove that they are whole, not who sent them. A trusted network only.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torpor.connectors.base import KVConnector, KVConnectorScheduler, KVConnectorWorker, Reach
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.lmcache import LMCacheConnector
from torpor.connectors.lmcache_pd_store import PairStore
from torpor.connectors.params import wants
from torpor.connectors.store import Store, StoreScheduler, shared_store
from torpor.connectors.store_worker import StoreWorker
from torpor.errors import BugError, RequestError
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.request import GenerationRequest


class PairScheduler(StoreScheduler):
    """What is handed over is announced in ``kv_transfer_params``; it may come later than the request."""

    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        for what, can, role in (("do_remote_decode", self._keeps, "producer"), ("do_remote_prefill", self._looks_up, "consumer")):
            if wants(params, what) and not can:
                raise RequestError(
                    f"kv_transfer_params.{what} needs an engine whose kv_role is {role}", param=f"kv_transfer_params.{what}"
                )
        if not wants(params, "do_remote_prefill"):
            return
        told = params.get("remote_num_tokens")
        if type(told) is not int or not 0 < told < 1 << 31:
            raise RequestError(
                f"kv_transfer_params.remote_num_tokens cannot be {told!r}", param="kv_transfer_params.remote_num_tokens"
            )

    def request_finished(
        self, request: GenerationRequest, block_ids: list[BlockId], num_computed_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        if not wants(request.kv_transfer_params, "do_remote_decode"):
            return False, None
        kept, _ = super().request_finished(request, block_ids, num_computed_tokens)
        tokens = self._full_blocks(min(num_computed_tokens, len(request.prompt_token_ids)))
        announced = {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": tokens}
        return kept, announced if kept else None

    def _held(self, request: GenerationRequest, num_tokens: int) -> int:
        params = request.kv_transfer_params or {}
        announced = self._full_blocks(int(params["remote_num_tokens"])) if wants(params, "do_remote_prefill") else 0
        return max(min(announced, num_tokens), super()._held(request, num_tokens))


class PairLMCacheConnector(LMCacheConnector):
    """``lmcache`` with ``pd_peer``."""

    reach: ClassVar[Reach] = "processes"

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        return cls

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return PairScheduler(config, spec, _store(config, spec))

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        return StoreWorker(config, spec, _store(config, spec))


def _store(config: ConnectorConfig, spec: KVCacheSpec) -> Store:
    found = shared_store(config, PairStore.name, lambda: PairStore(config, spec))
    if not isinstance(found, PairStore):
        raise BugError("an engine has lmcache both with and without pd_peer")
    return found
