"""The worker side of connectors that keep KV themselves. It makes nothing of the KV cache known to anybody: what it has of it
while the engine serves are copies under way, and a release waits for those."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torpor.connectors.base import ConnectorMetadata, ConnectorStats, Finished, KVConnectorWorker, LoadRequest
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.geometry import KV_TAG, layer_addresses
from torpor.connectors.mover import Mover
from torpor.connectors.store import Fetch, Save, Store, StoreMetadata
from torpor.errors import ConnectorError, StateError, TransportError
from torpor.kvcache.types import Epoch, KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory


class StoreWorker(KVConnectorWorker):
    """Registered: blocks move. Released: none does, and what the store holds stays as it is."""

    def __init__(self, config: ConnectorConfig, spec: KVCacheSpec, store: Store) -> None:
        self._config = config
        self._spec = spec
        self._store = store
        self._epoch: Epoch | None = None  # of the last registration
        self._registered = False
        self._claimed = False
        self._release_s = 0.0  # what the last one took; a restore does nothing
        self._tell: Callable[[], None] = _nothing
        self._mover: Mover | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec, memory: Memory) -> None:
        if self._mover is not None:
            raise StateError("the KV cache is registered already", state="registered")
        layer_addresses(kv_caches, spec)
        strangers = [name for name, tensor in kv_caches.items() if memory.tag_of(tensor) != KV_TAG]
        if strangers:
            raise ConnectorError(f"KV cache tensor {strangers[0]!r} lies in no region of pool {KV_TAG!r}")
        self._store.claim()
        self._claimed = True
        try:
            self._store.open(kv_caches, memory)
            self._mover = Mover(self._store, memory.device.synchronize, self._tell)
        except BaseException:
            self.shutdown()
            raise
        self._epoch, self._registered = Epoch.first(), True

    def tell_when_finished(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    # ---- steps ------------------------------------------------------------------------------------------------------

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        mover = self._live_mover
        for load in metadata.loads:
            if not self._registered:
                mover.drop_load(load.request_id, "this engine's KV cache is released")
            elif load.local_block_ids:
                mover.load(_fetch(load))
        for request_id in metadata.cancelled:
            mover.cancel(request_id)
        if isinstance(metadata, StoreMetadata):
            self._keep(metadata.saves)

    def _keep(self, orders: list[Save]) -> None:
        """Blocks of another mapping than the present one hold somebody else's KV by now, or nothing."""
        for order in orders:
            if self._registered and order.epoch == str(self._epoch):
                self._live_mover.save(order)
            else:
                self._live_mover.drop_save(order)

    def get_finished(self) -> Finished:
        return self._live_mover.take_finished()

    # ---- sleep and wake ---------------------------------------------------------------------------------------------

    def release_kv_caches(self) -> None:
        if self._registered:
            begun = time.monotonic()
            try:
                self._release()
            finally:
                self._release_s = time.monotonic() - begun

    def _release(self) -> None:
        mover = self._live_mover
        mover.cancel_loads()
        self._keep(self._store.take_orders())
        if not mover.wait_idle(time.monotonic() + self._config.withdraw_timeout_s):
            raise TransportError(
                f"{mover.saves_in_flight} copies of KV blocks to {self._store.path} have not ended (withdraw_timeout_s): "
                "nothing was unmapped",
                transport=self._store.name,
                setting="withdraw_timeout_s",
            )
        # Complete, but nobody has taken note yet: what arrived goes with the memory.
        mover.take_finished(arrived_is_lost=True)
        self._registered = False

    def restore_kv_caches(self) -> None:
        if self._registered:
            return
        if self._epoch is None:
            raise StateError("register_kv_caches comes first", state="new")
        self._epoch, self._registered = self._epoch.next(), True

    def shutdown(self) -> None:
        """What was ordered is kept, within ``withdraw_timeout_s``: the next engine may find it."""
        deadline = time.monotonic() + self._config.withdraw_timeout_s
        if self._mover is not None:
            self._mover.cancel_loads()
            self._keep(self._store.take_orders())
            self._mover.wait_idle(deadline)
            self._mover.close()
        self._registered = False
        if self._claimed:
            self._store.close(max(0.1, deadline - time.monotonic()))

    # ---- how it is --------------------------------------------------------------------------------------------------

    def epoch(self) -> Epoch | None:
        return self._epoch if self._registered else None

    def get_handshake_metadata(self) -> dict[str, Any] | None:
        """For the scheduler side alone: there is nothing here that a peer could connect to."""
        epoch = self.epoch()
        return None if epoch is None else {"engine_id": str(self._config.engine_id), "epoch": str(epoch)}

    def stats(self) -> ConnectorStats:
        mover, epoch = self._mover, self.epoch()
        return ConnectorStats(
            connector=self._store.name,
            engine_id=str(self._config.engine_id),
            path=self._store.path,
            epoch=None if epoch is None else str(epoch),
            registered_bytes=0,
            pending_hand_offs=mover.saves_in_flight if mover is not None else 0,
            loads_in_flight=mover.loads_in_flight if mover is not None else 0,
            loads_done=mover.loads_done if mover is not None else 0,
            loads_failed=mover.loads_failed if mover is not None else 0,
            bytes_received=mover.bytes_loaded if mover is not None else 0,
            store=self._store.stats(),
            release_s=self._release_s,
        )

    @property
    def _live_mover(self) -> Mover:
        if self._mover is None:
            raise StateError("register_kv_caches comes first", state="new")
        return self._mover


def _nothing() -> None:
    return


def _fetch(load: LoadRequest) -> Fetch:
    return Fetch(
        request_id=load.request_id,
        token_ids=load.params["token_ids"],
        first_block=load.first_block,
        block_ids=list(load.local_block_ids),
        version=load.params["version"],
        asked=time.monotonic(),
    )
