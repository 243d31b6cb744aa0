"""``offload``: KV of finished prompts is kept in host memory and, with a folder, on disk, and comes back when a prompt begins
with the same tokens. It is one engine's own.

What is found under a block's name (``store_names``) is right or does not exist. What is kept survives sleeps, and on disk the
engine too. With other weights it has no name any more; its memory and files are given back.

Blocks are written to disk after they were copied to host memory. A block waits in host memory until its file is written; when all
of that memory waits, blocks that arrive are not kept, and counted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from torpor.connectors.base import FindsBy, KVConnector, KVConnectorScheduler, KVConnectorWorker, Reach, StoreStats
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.geometry import layer_addresses
from torpor.connectors.offload_disk import DiskShelf
from torpor.connectors.offload_host import HostShelf
from torpor.connectors.options import read_options
from torpor.connectors.store import Fetch, Save, Store, StoreScheduler, shared_store
from torpor.connectors.store_names import Names, block_bytes_of
from torpor.connectors.store_worker import StoreWorker
from torpor.errors import ConfigurationError, TransportError
from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory

logger = logging.getLogger(__name__)

OPTIONS = {"host_bytes", "disk_dir", "disk_bytes"}
PIECE_BYTES = 32 << 20  # of one call of the device's copies, between two looks at whether to go on


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    host_bytes: int = 1 << 30
    disk_dir: str | None = None  # None: nothing is kept on disk
    disk_bytes: int = 8 << 30  # files' content and headers; what the file system takes besides is not counted

    @classmethod
    def of(cls, config: ConnectorConfig, spec: KVCacheSpec) -> OffloadOptions:
        """ConfigurationError for unknown options, and for sizes without room for one block."""
        options = read_options(cls, config, OPTIONS)
        if options.disk_dir is None and "disk_bytes" in config.extra:
            raise ConfigurationError("disk_bytes needs a disk_dir", setting="disk_dir", value=None)
        block = block_bytes_of(spec)
        for name, value in (("host_bytes", options.host_bytes), ("disk_bytes", options.disk_bytes)):
            if value < 2 * block:
                raise ConfigurationError(
                    f"{name} is {value}: there must be room for two blocks, and one of all layers has {block} bytes",
                    setting=name,
                    value=value,
                )
        return options


class OffloadStore(Store):
    name: ClassVar[str] = "offload"

    def __init__(self, options: OffloadOptions, spec: KVCacheSpec) -> None:
        super().__init__(spec.model_id)
        self._spec = spec
        self._names = Names(spec.model_id, spec)
        self._host = HostShelf(options.host_bytes, block_bytes_of(spec))
        self._step = max(1, PIECE_BYTES // self._host.block_bytes)  # blocks
        self._disk = (
            DiskShelf(Path(options.disk_dir).expanduser(), options.disk_bytes, block_bytes_of(spec)) if options.disk_dir else None
        )
        self._arrays: npt.NDArray[np.uint64]  # addresses of block 0 of K and of V of every layer; from open() on
        self._memory: Memory
        self._writes: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._saved = self._loaded = self._skipped = 0

    @property
    def path(self) -> str:
        host = f"host memory ({self._host.nbytes / 2**20:.0f} MiB)"
        return host if self._disk is None else f"{host} and disk ({self._disk.limit * self._disk.file_bytes / 2**20:.0f} MiB)"

    def open(self, kv_caches: dict[str, torch.Tensor], memory: Memory) -> None:
        half = self._spec.num_blocks * self._spec.block_bytes
        starts = layer_addresses(kv_caches, self._spec)
        self._arrays = np.array([a for start in starts for a in (start, start + half)], dtype=np.uint64)
        self._memory = memory
        self._host.open(page_locked=memory.device.driver == "cuda")
        if self._disk is not None:
            self._disk.open(self._names.root)
            self._writer = threading.Thread(target=self._write, name="torpor-kv-offload-disk", daemon=True)
            self._writer.start()

    def held_tokens(self, token_ids: Sequence[int]) -> int:
        held = sum(1 for _ in itertools.takewhile(self._has, self._names.asked(token_ids)))
        return held * self._spec.block_size

    def _has(self, name: bytes) -> bool:
        return name in self._host or (self._disk is not None and name in self._disk)

    # ---- out of the KV cache ----------------------------------------------------------------------------------------

    def save(self, save: Save) -> None:
        names = self._names.of(save.token_ids)
        blocks = dict(zip(names, save.block_ids, strict=True))
        wanted = [name for name in names if not self._has(name)]
        # A block is worth nothing without those before it: the first that finds no room is the end.
        reserved = list(itertools.takewhile(self._host.reserve, wanted))
        self._skipped += len(wanted) - len(reserved)
        try:
            for start in range(0, len(reserved), self._step):
                piece = reserved[start : start + self._step]
                self._memory.device.copy("to_host", self._spans([(name, blocks[name]) for name in piece]))
        except BaseException:
            for name in reserved:
                self._host.give_back(name)
            raise
        self._enter(reserved, save.version)
        self._touch(names)

    def _enter(self, names: list[bytes], version: str) -> None:
        """They are in host memory, under names that are right if the weights are still those; then on to the disk. The last goes
        first, as it is the first to be given up."""
        for name in reversed(names):
            if version == self.version:
                self._host.fill(name)
                self._saved += 1
            if version == self.version and self._writer is not None:
                self._writes.put(name)
            else:
                self._host.give_back(name)

    def _touch(self, names: list[bytes]) -> None:
        self._host.touch(names)
        if self._disk is not None:
            self._disk.touch(names)

    def _write(self) -> None:
        assert self._disk is not None
        while (name := self._writes.get()) is not None:
            try:
                if name in self._host:
                    self._disk.write(name, self._host.content(name))
            except Exception:
                logger.exception("writing a KV block to disk")
            finally:
                self._host.give_back(name)

    # ---- into the KV cache ------------------------------------------------------------------------------------------

    def load(self, fetch: Fetch, stop: Callable[[], bool]) -> int:
        names = self._names.of(fetch.token_ids)
        pairs: list[tuple[bytes, int]] = list(zip(names[fetch.first_block :], fetch.block_ids, strict=True))
        for start in range(0, len(pairs), self._step):
            with self._at_hand(pairs[start : start + self._step]) as piece:
                if stop():
                    raise TransportError("nobody waits for it any more", transport=self.name)
                self._memory.device.copy("to_device", self._spans(piece, to_device=True))
        if fetch.version != self.version:
            raise TransportError("the weights have changed meanwhile", transport=self.name)
        self._loaded += len(pairs)
        self._touch(names)
        return len(pairs) * self._host.block_bytes

    @contextlib.contextmanager
    def _at_hand(self, pairs: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
        """The blocks in host memory, from disk where they are only there."""
        borrowed: list[bytes] = []
        try:
            for name, _ in pairs:
                if not (self._host.borrow(name) or self._from_disk(name)):
                    raise TransportError("a block of it is not kept any more", transport=self.name)
                borrowed.append(name)
            yield pairs
        finally:
            for name in borrowed:
                self._host.give_back(name)

    def _from_disk(self, name: bytes) -> bool:
        """Into host memory, borrowed. False: it is not there, or there is no room."""
        if self._disk is None or name not in self._disk or not self._host.reserve(name):
            return False
        if self._disk.read(name, self._host.content(name)):
            self._host.fill(name)
            return True
        self._host.give_back(name)
        return False

    def _spans(self, pairs: list[tuple[bytes, int]], *, to_device: bool = False) -> npt.NDArray[np.uint64]:
        """(destination, source, bytes) of every array's part of every block."""
        size = self._spec.block_bytes
        slots = np.array([self._host.address(name) for name, _ in pairs], dtype=np.uint64)[:, None]
        host = slots + np.arange(len(self._arrays), dtype=np.uint64) * np.uint64(size)
        blocks = np.array([block for _, block in pairs], dtype=np.uint64)[:, None]
        cache = self._arrays + blocks * np.uint64(size)
        ends = (cache, host) if to_device else (host, cache)
        return np.stack([*(end.reshape(-1) for end in ends), np.full(cache.size, size, dtype=np.uint64)], axis=1)

    # ---- other weights, how it is, the end --------------------------------------------------------------------------

    def set_version(self, version: str) -> None:
        if version == self.version:
            return
        self.version = version
        self._names.use(version)
        self._host.clear()
        if self._disk is not None:
            try:
                self._disk.use(self._names.root)
            except ConfigurationError as error:  # as when it fails later: what is not kept is computed
                logger.warning("no KV of the new weights is kept on disk: %s", error)

    def stats(self) -> StoreStats:
        host, disk = self._host, self._disk
        return StoreStats(
            host_blocks=len(host),
            host_bytes=host.used_bytes,
            host_limit_bytes=host.nbytes,
            disk_blocks=len(disk) if disk is not None else 0,
            disk_bytes=disk.used_bytes if disk is not None else 0,
            disk_limit_bytes=disk.limit * disk.file_bytes if disk is not None else 0,
            saved_blocks=self._saved,
            loaded_blocks=self._loaded,
            evicted_blocks=host.evicted + (disk.evicted if disk is not None else 0),
            skipped_blocks=self._skipped,
            disk_errors=disk.errors if disk is not None else 0,
            bad_files=disk.bad if disk is not None else 0,
            leftover_files=disk.leftovers if disk is not None else 0,
        )

    def close(self, timeout_s: float) -> None:
        if self.closed:
            return
        self.closed = True
        if self._writer is not None:
            deadline = time.monotonic() + timeout_s
            self._writes.put(None)
            self._writer.join(max(0.0, deadline - time.monotonic()))
            if self._writer.is_alive():
                logger.warning("%d KV blocks were not written to disk before the end", self._writes.qsize())
                return  # the folder stays ours as long as something writes there
        if self._disk is not None:
            self._disk.close()
        self._host.close()


class OffloadConnector(KVConnector):
    """Registered as ``offload``. Options in ``extra``: ``host_bytes``, ``disk_dir``, ``disk_bytes``. Nobody but the engine's own
    thread reads its KV cache, so its range needs no guard while it sleeps."""

    supports_sleep_mode: ClassVar[bool] = True
    supports_weight_updates: ClassVar[bool] = True
    guarded: ClassVar[bool] = False
    reach: ClassVar[Reach] = "engine"
    finds_by: ClassVar[FindsBy] = "tokens"

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        read_options(OffloadOptions, config, OPTIONS)
        return cls

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return StoreScheduler(config, spec, _store(config, spec))

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        return StoreWorker(config, spec, _store(config, spec))


def _store(config: ConnectorConfig, spec: KVCacheSpec) -> Store:
    return shared_store(config, OffloadStore.name, lambda: OffloadStore(OffloadOptions.of(config, spec), spec))
