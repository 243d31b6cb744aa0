"""LMCache's cache engine in this process, through the calls that its engine integrations make (``LMCacheEngineBuilder``,
``store``, ``lookup``, ``retrieve``) and a ``GPUConnectorInterface`` of ours, which copies between its chunks and our KV cache.

Facts this relies on, all run (``docs/design/connectors.md``):
- Its keys are Python's 64-bit ``hash`` of a chunk's tokens and the key before it. What it is given for tokens here are words of
  our own names instead, so that a key depends on weights and layout, is the same in every process, and cannot be aimed at.
- Making an engine sets this process's multiprocessing start method to "spawn".
- It reports its use over the network, and logs at INFO, unless the environment says otherwise before the import.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torpor.connectors.lmcache_chunks import Chunks
from torpor.errors import ConfigurationError, ConnectorError, TransportError
from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor._native import Device

WORD_BYTES = 8
MAX_WRONG = 4096
MAX_MODEL_NAME = 48  # a key of LMCache's server has at most 150 characters
_lock = threading.Lock()


@dataclass(frozen=True)
class Package:
    """What is used of LMCache."""

    builder: Any
    config: Any
    metadata: Any
    gpu_connector: Any
    broadcast: Any
    broadcast_object: Any


def load_package() -> Package:
    """ConnectorError when LMCache is not installed, or cannot be loaded."""
    with _lock:
        # Read by the package when it is imported and taken in no other way.
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        try:
            engine = importlib.import_module("lmcache.v1.cache_engine")
            utils = importlib.import_module("lmcache.utils")
            return Package(
                builder=engine.LMCacheEngineBuilder,
                config=importlib.import_module("lmcache.v1.config").LMCacheEngineConfig,
                metadata=importlib.import_module("lmcache.v1.metadata").LMCacheMetadata,
                gpu_connector=importlib.import_module("lmcache.v1.gpu_connector").GPUConnectorInterface,
                broadcast=utils.mock_up_broadcast_fn,
                broadcast_object=utils.mock_up_broadcast_object_fn,
            )
        except (ImportError, AttributeError) as error:
            raise ConnectorError(
                f"connector 'lmcache' needs LMCache: pip install 'torpor[lmcache]' ({error})",
                connector="lmcache",
                setting="kv_connector",
            ) from error


def words_of(names: Sequence[bytes], block_size: int) -> list[int]:
    """``block_size`` numbers for every block, which LMCache takes for its tokens: as much of the name as there is room for."""
    words: list[int] = []
    for name in names:
        own = [int.from_bytes(name[i : i + WORD_BYTES], "little") >> 1 for i in range(0, len(name), WORD_BYTES)][:block_size]
        words += own + [0] * (block_size - len(own))
    return words


@dataclass(frozen=True)
class Remote:
    """Where engines of other processes find what is kept."""

    url: str
    timeout_s: float  # lm: of one exchange with the server

    def settings(self) -> dict[str, Any]:
        """Fields of LMCache's configuration."""
        if not self.url.startswith("lm://"):
            return {"remote_url": self.url}
        from torpor.connectors.lmcache_remote import settings_of

        return settings_of(self.address(), self.timeout_s)

    def address(self) -> tuple[str, int]:
        """ValueError when it names no host and port."""
        parts = urlsplit(self.url)
        if not parts.hostname or not parts.port:
            raise ValueError(f"{self.url!r} is not lm://HOST:PORT")
        return parts.hostname, parts.port


def metadata_of(package: Package, spec: KVCacheSpec, chunks: Chunks, rank: int = 0) -> Any:
    """What LMCache is told of the model: the shape of chunks. What tells models apart is in the names of blocks."""
    return package.metadata(
        model_name=spec.model_id.replace("@", "-")[-MAX_MODEL_NAME:],  # "@" separates the parts of LMCache's keys
        world_size=1,
        local_world_size=1,
        worker_id=rank,
        local_worker_id=rank,
        kv_dtype=chunks.dtype,
        kv_shape=(chunks.layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim),
        chunk_size=spec.block_size,
    )


class Engine:
    """``lookup`` may run beside one ``store`` or ``retrieve``. TransportError for whatever LMCache raises."""

    def __init__(
        self,
        name: str,
        spec: KVCacheSpec,
        kv_caches: dict[str, torch.Tensor],
        device: Device,
        host_bytes: int,
        remote: Remote | None,
    ) -> None:
        """Takes its host memory at once. ConfigurationError for a remote it does not know."""
        self._package = load_package()
        self._name = name
        self._block_size = spec.block_size
        self._layers = [kv_caches[f"layers.{i}"] for i in range(spec.num_layers)]
        self._wrong: set[bytes] = set()  # what was found under these names is something else
        chunks = Chunks(spec, device, sealed=remote is not None)
        config = self._package.config.from_defaults(
            chunk_size=spec.block_size,
            local_cpu=True,
            max_local_cpu_size=host_bytes / 2**30,
            remote_serde="naive" if remote else None,
            save_unfull_chunk=False,
            **(remote.settings() if remote else {}),
        )
        metadata = metadata_of(self._package, spec, chunks)
        started = multiprocessing.get_start_method(allow_none=True)
        try:
            self._engine = self._package.builder.get_or_create(
                name,
                config,
                metadata,
                _paged_connector(self._package, chunks, self._wrong),
                self._package.broadcast,
                self._package.broadcast_object,
            )
            self._engine.post_init()
        except Exception as error:
            self.close()
            raise ConfigurationError(
                f"LMCache cannot start (host_bytes {host_bytes}, {remote}): {type(error).__name__}: {error}",
                setting="remote_url" if remote else "host_bytes",
                value=remote.url if remote else host_bytes,
            ) from error
        finally:
            multiprocessing.set_start_method(started, force=True)

    def lookup(self, names: Sequence[bytes]) -> int:
        """How many of the leading blocks it has."""
        believed = list(itertools.takewhile(lambda name: name not in self._wrong, names))
        try:
            return int(self._engine.lookup(words_of(believed, self._block_size))) // self._block_size
        except Exception as error:
            raise _translated("look up", error) from error

    def store(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Blocks until the KV cache was read."""
        try:
            self._engine.store(words_of(names, self._block_size), kvcaches=self._layers, blocks=list(blocks), names=list(names))
        except Exception as error:
            raise _translated("store", error) from error
        self._wrong.difference_update(names)

    def retrieve(self, names: Sequence[bytes], first: int, blocks: Sequence[int]) -> int:
        """Block ``first + i`` into ``blocks[i]``; how many arrived. Blocks until nothing of it writes any more."""
        import torch

        words = words_of(names, self._block_size)
        mask = torch.ones(len(words), dtype=torch.bool)
        mask[: first * self._block_size] = False
        # Blocks of what is not asked for are never looked at.
        there = [0] * first + list(blocks)
        try:
            found = self._engine.retrieve(
                words, mask=mask, kvcaches=self._layers, blocks=there, names=list(names), req_id="torpor"
            )
        except Exception as error:
            raise _translated("retrieve", error) from error
        if wrong := self._wrong.intersection(names):
            self._forget(names)
            raise TransportError(f"{len(wrong)} blocks are not what was kept under their names", transport="lmcache")
        return int(found.sum()) // self._block_size

    def _forget(self, names: Sequence[bytes]) -> None:
        """Not to be found here: the next time that this prompt ends they are kept anew."""
        if len(self._wrong) > MAX_WRONG:
            self._wrong.clear()
        with contextlib.suppress(Exception):
            self._engine.clear(words_of(names, self._block_size), locations=["LocalCPUBackend"])

    def clear_local(self) -> None:
        """What is in this process's memory. A remote keeps what it has, under names that nobody asks for any more."""
        try:
            self._engine.clear(locations=["LocalCPUBackend"])
        except Exception as error:
            raise _translated("clear", error) from error

    def close(self) -> None:
        """Idempotent. LMCache ends the thread of its event loop and leaves the loop itself open."""
        loop = getattr(getattr(getattr(self, "_engine", None), "storage_manager", None), "loop", None)
        self._layers = []
        self._package.builder.destroy(self._name)
        if loop is not None and not loop.is_running():
            loop.close()


def _paged_connector(package: Package, chunks: Chunks, wrong: set[bytes]) -> Any:
    """LMCache's way to and from our KV cache. Names of chunks that do not prove what they are go into ``wrong``."""

    class PagedConnector(package.gpu_connector):  # type: ignore[misc,name-defined]
        def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
            return

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            index = start // (end - start)
            chunks.fill(memory_obj.tensor, kwargs["kvcaches"], kwargs["blocks"][index], kwargs["names"][index])

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            index = start // (end - start)
            if chunks.proves(memory_obj.tensor, kwargs["names"][index]):
                chunks.empty(memory_obj.tensor, kwargs["kvcaches"], kwargs["blocks"][index])
            else:
                wrong.add(kwargs["names"][index])

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for one in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(*one, **kwargs)

        def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
            for one in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(*one, **kwargs)

        def get_shape(self, num_tokens: int) -> torch.Size:
            return chunks.shape

    return PagedConnector()


def _translated(what: str, error: Exception) -> TransportError:
    return TransportError(f"LMCache cannot {what}: {type(error).__name__}: {error}", transport="lmcache")
