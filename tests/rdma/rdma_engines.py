"""Stand-in engines that talk over an RDMA device, each in a process of its own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rdma_child import Child
from rdma_transports import NIXL, RdmaTransport

from torpor.connectors import ConnectorConfig, get_connector
from torpor.connectors.worker import PullWorker
from torpor.kvcache.types import KVCacheSpec
from torpor.memory.procfs import pinned_bytes
from torpor.testing.kv_engine import KVEngine

# 64 MiB, so that what is held stands out from what UCX and the kernel hold for themselves.
SPEC = KVCacheSpec(
    model_id="stand-in@1", num_layers=2, num_blocks=256, block_size=16, num_kv_heads=8, head_dim=128, dtype="float32"
)
CACHE_BYTES = 2 * SPEC.num_layers * SPEC.num_blocks * SPEC.block_bytes


class RdmaEngine(KVEngine):
    """``KVEngine`` with what the tests ask beyond it."""

    def __init__(self, config: ConnectorConfig, transport: RdmaTransport = NIXL) -> None:
        self._write = transport.write
        super().__init__(config, SPEC, kind=get_connector(config.connector))

    @property
    def _pull(self) -> PullWorker:
        assert isinstance(self.worker, PullWorker)
        return self.worker

    def pinned(self) -> int:
        return pinned_bytes()

    def epoch(self) -> str:
        return str(self._pull.epoch())

    def told(self) -> Any:
        return self.worker.stats()

    def sleep_report(self) -> dict[str, Any]:
        report = self.sleep()
        return {"unmapped": report.unmapped_bytes, "held": report.held_bytes, "hooks_s": report.hooks_s}

    def wake_report(self) -> dict[str, Any]:
        return {"hooks_s": self.wake().hooks_s}

    def write_over_the_wire(self, remote_block: int, byte: int) -> None:
        """Into K of layer 0 at the engine we read from."""
        (puller,) = self._pull._live_reader._pullers.values()
        link = puller.link
        assert link is not None
        remote: Any = link._remote
        first: int = remote._theirs.arrays()[0]
        self._write(remote, first + remote_block * self.spec.block_bytes, byte)

    def fill(self) -> None:
        """Every page of the cache is there, and reads as zeros."""
        for tensor in self.kv_caches.values():
            tensor.zero_()

    def first_bytes(self, block: int) -> list[int]:
        """Of K of layer 0."""
        return sorted(set(self.block(block)[: self.spec.block_bytes]))


class Engines:
    """Starts engines of one transport over one device; ends them all."""

    def __init__(self, transport: RdmaTransport, device: str, folder: Path, children: list[Child]) -> None:
        self.transport = transport
        self._settings = transport.settings(device, folder)
        self._children = children

    def start(self, engine_id: str, role: Any, *, connector: str | None = None, make: Any = RdmaEngine, **extra: Any) -> Child:
        """``connector``: another class than the transport's own. ``extra``: options besides."""
        settings = {**self._settings, "extra": self._settings["extra"] | extra}
        config = ConnectorConfig(
            connector=connector or self.transport.connector,
            engine_id=engine_id,
            role=role,
            withdraw_timeout_s=30.0,
            lease_heartbeat_s=2.0,
            **settings,
        )
        self._children.append(Child(functools.partial(make, config, self.transport)))
        return self._children[-1]
