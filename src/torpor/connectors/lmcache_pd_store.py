"""What either end of LMCache's P/D mode does with its staging buffer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torpor.connectors.base import StoreStats
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.lmcache_chunks import Chunks
from torpor.connectors.lmcache_engine import load_package, metadata_of
from torpor.connectors.lmcache_options import LMCacheOptions, Peer
from torpor.connectors.store import Fetch, Save, Store
from torpor.connectors.store_names import Names, block_bytes_of
from torpor.errors import ConfigurationError, TorporError, TransportError
from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.connectors.lmcache_pd_backend import Receiver, Sender
    from torpor.memory import Memory

logger = logging.getLogger(__name__)

POLL_S = 0.002
ROLES = {"producer": "sender", "consumer": "receiver"}


class PairStore(Store):
    """One end's staging buffer, and what goes through it."""

    name: ClassVar[str] = "lmcache"

    def __init__(self, config: ConnectorConfig, spec: KVCacheSpec) -> None:
        super().__init__(spec.model_id)
        self._options = LMCacheOptions.of(config)
        assert self._options.peer is not None
        self._peer: Peer = self._options.peer
        self._spec = spec
        self._role = ROLES.get(config.role, "")
        if not self._role:
            raise ConfigurationError(
                f"kv_role {config.role!r}: lmcache's P/D mode (pd_peer) needs a producer or a consumer",
                setting="kv_role",
                value=config.role,
            )
        chunk_bytes = block_bytes_of(spec) // spec.num_layers * (spec.num_layers + 1)
        if self._options.pd_buffer_bytes < 2 * chunk_bytes:
            raise ConfigurationError(
                f"pd_buffer_bytes is {self._options.pd_buffer_bytes}: there must be room for two chunks of {chunk_bytes} bytes",
                setting="pd_buffer_bytes",
                value=self._options.pd_buffer_bytes,
            )
        self._names = Names(spec.model_id, spec)
        self._layers: list[torch.Tensor] = []
        self._chunks: Chunks
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._pushes: queue.SimpleQueue[tuple[list[bytes], list[Any]] | None] = queue.SimpleQueue()
        self._pusher: threading.Thread | None = None
        self._saved = self._loaded = self._skipped = 0

    @property
    def path(self) -> str:
        place = f"{self._peer.host}:{self._peer.init_port}"
        size = f"{self._options.pd_buffer_bytes / 2**20:.0f} MiB on {self._options.pd_buffer_device}"
        return f"LMCache's P/D mode, {'to' if self._role == 'sender' else 'at'} {place}, through {size}"

    def open(self, kv_caches: dict[str, torch.Tensor], memory: Memory) -> None:
        package = load_package()
        from torpor.connectors.lmcache_pd_backend import Receiver, Sender

        self._check_device(memory)
        self._layers = [kv_caches[f"layers.{i}"] for i in range(self._spec.num_layers)]
        self._chunks = Chunks(self._spec, memory.device, sealed=True)
        # LMCache puts its buffer on the device that its rank says.
        rank = memory.config.device if self._options.pd_buffer_device == "cuda" else 0
        metadata = metadata_of(package, self._spec, self._chunks, rank)
        config = package.config.from_defaults(**self._settings(rank))
        try:
            if self._role == "receiver":
                self._receiver = Receiver(config, metadata, self._chunks, self._peer)
                return
            self._sender = Sender(config, metadata, self._chunks, self._peer, self._options.pd_wait_s)
        except TorporError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"LMCache's P/D mode cannot start ({self.path}): {type(error).__name__}: {error}", setting="pd_peer", value=None
            ) from error
        self._pusher = threading.Thread(target=self._push, name="torpor-kv-lmcache-push", daemon=True)
        self._pusher.start()

    def _check_device(self, memory: Memory) -> None:
        if self._options.pd_buffer_device == "cuda" and memory.device.driver != "cuda":
            raise ConfigurationError(
                "lmcache: pd_buffer_device 'cuda' needs an engine on a GPU; 'cpu' is host memory",
                setting="pd_buffer_device",
                value="cuda",
            )

    def _settings(self, rank: int) -> dict[str, Any]:
        """Fields of LMCache's configuration."""
        return {
            "chunk_size": self._spec.block_size,
            "local_cpu": False,
            "enable_pd": True,
            "pd_role": self._role,
            "pd_peer_host": self._peer.host,
            "pd_peer_init_port": [self._peer.init_port] * (rank + 1),
            "pd_peer_alloc_port": [self._peer.alloc_port] * (rank + 1),
            "pd_buffer_size": self._options.pd_buffer_bytes,
            "pd_buffer_device": self._options.pd_buffer_device,
            "pd_skip_proxy_notification": True,
            "pd_backend_mode": "sync",
            "transfer_channel": "nixl",
            "nixl_backends": ["UCX"],
            "save_unfull_chunk": True,  # LMCache insists; ours are always full
        }

    # ---- the prefill engine -----------------------------------------------------------------------------------------

    def save(self, save: Save) -> None:
        """Into our staging buffer; from there it goes on without the KV cache."""
        if self._sender is None or save.version != self.version:
            return
        names = self._names.of(save.token_ids)
        taken = self._sender.take(len(names))
        if taken is None:
            self._skipped += len(names)
            raise TransportError(f"no room for {len(names)} blocks in the staging buffer (pd_buffer_bytes)", transport=self.name)
        try:
            for name, chunk, block in zip(names, taken, save.block_ids, strict=True):
                self._chunks.fill(chunk.tensor, self._layers, block, name)
        except BaseException:
            _give_back(taken)
            raise
        self._pushes.put((names, taken))

    def _push(self) -> None:
        assert self._sender is not None
        while (given := self._pushes.get()) is not None:
            names, chunks = given
            try:
                self._push_or_again(self._sender, names, chunks)
                self._saved += len(names)
            except Exception as error:  # one request's KV is computed anew; the thread serves all others
                self._skipped += len(names)
                logger.warning("the KV of %d blocks is not handed over: %s", len(names), error)
            finally:
                _give_back(chunks)

    def _push_or_again(self, sender: Sender, names: list[bytes], chunks: list[Any]) -> None:
        """A decode engine that began anew is another one to NIXL, which the first push finds out."""
        try:
            sender.push(names, chunks)
        except TransportError as error:
            if self.closed:
                raise
            logger.info("%s: once more", error)
            sender.push(names, chunks)

    # ---- the decode engine ------------------------------------------------------------------------------------------

    def held_tokens(self, token_ids: Sequence[int]) -> int:
        held = 0
        if self._receiver is not None:
            for name in self._names.asked(token_ids):
                if not self._receiver.holds(name):
                    break
                held += 1
        return held * self._spec.block_size

    def load(self, fetch: Fetch, stop: Callable[[], bool]) -> int:
        if self._receiver is None or fetch.version != self.version:
            raise TransportError("the weights have changed", transport=self.name)
        names = self._names.of(fetch.token_ids)
        deadline = fetch.asked + self._options.pd_wait_s  # those that never come are late together, not one after the other
        for name, block in zip(names[fetch.first_block :], fetch.block_ids, strict=True):
            self._chunks.empty(self._arrived(self._receiver, name, stop, deadline), self._layers, block)
        if fetch.version != self.version:
            raise TransportError("the weights have changed meanwhile", transport=self.name)
        self._receiver.drop(names)
        self._loaded += len(fetch.block_ids)
        return len(fetch.block_ids) * block_bytes_of(self._spec)

    def _arrived(self, receiver: Receiver, name: bytes, stop: Callable[[], bool], deadline: float) -> torch.Tensor:
        while True:
            if stop():
                raise TransportError("nobody waits for it any more", transport=self.name)
            chunk = receiver.copy_of(name)
            if chunk is not None:
                return chunk
            if time.monotonic() > deadline:
                raise TransportError("not all of it has come (pd_wait_s)", transport=self.name, setting="pd_wait_s")
            time.sleep(POLL_S)

    # ---- other weights, how it is, the end --------------------------------------------------------------------------

    def set_version(self, version: str) -> None:
        if version == self.version:
            return
        self.version = version
        self._names.use(version)
        if self._receiver is not None:
            self._receiver.drop_all()

    def stats(self) -> StoreStats:
        return StoreStats(
            host_limit_bytes=self._options.pd_buffer_bytes,
            saved_blocks=self._saved,
            loaded_blocks=self._loaded,
            skipped_blocks=self._skipped,
        )

    def close(self, timeout_s: float) -> None:
        if self.closed:
            return
        self.closed = True
        self._layers = []
        if self._pusher is not None:
            self._pushes.put(None)
            self._pusher.join(timeout_s)
            if self._pusher.is_alive():
                logger.warning("LMCache is still pushing to %s at the end", self._peer.host)
                return
        for end in (self._sender, self._receiver):
            if end is not None:
                end.close()
        self._sender = self._receiver = None


def _give_back(chunks: list[Any]) -> None:
    for chunk in chunks:
        chunk.ref_count_down()
