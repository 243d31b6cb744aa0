"""Stand-in engines that talk over an RDMA device, each in a process of its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from rdma_child import Child

from torpor.connectors import ConnectorConfig, KVConnector, get_connector
from torpor.connectors.nixl_reads import rows
from torpor.connectors.worker import PullWorker
from torpor.kvcache.types import KVCacheSpec
from torpor.memory.procfs import pinned_bytes
from torpor.testing.kv_engine import KVEngine

# 64 MiB, so that what is held stands out from what UCX and the kernel hold for themselves.
SPEC = KVCacheSpec(
    model_id="stand-in@1", num_layers=2, num_blocks=256, block_size=16, num_kv_heads=8, head_dim=128, dtype="float32"
)
CACHE_BYTES = 2 * SPEC.num_layers * SPEC.num_blocks * SPEC.block_bytes
RDMA_ONLY = {"ucx_tls": "rc_v"}  # without it UCX would use shared memory within one host, and nothing would be proven
RXE_HOST = "10.99.0.1"  # of the device in the machine that scripts/rdma-vm boots
SLOW = {"connect_timeout_s": 30.0, "handshake_timeout_s": 30.0, "read_timeout_s": 60.0}  # an emulated processor


class RdmaEngine(KVEngine):
    """``KVEngine`` with what the tests ask beyond it."""

    def __init__(self, config: ConnectorConfig, kind: type[KVConnector]) -> None:
        super().__init__(config, SPEC, kind=kind)

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
        """A one-sided WRITE into K of layer 0 at the engine we read from, as a peer that pushes KV would do."""
        (puller,) = self._pull._live_reader._pullers.values()
        link = puller.link
        assert link is not None
        remote: Any = link._remote
        station = remote._station
        size = station.block_bytes
        station._staging[:size] = byte
        there = remote._theirs.arrays()[0] + remote_block * size
        local = station.agent.prepare(None, rows((station.address, size, 0, 1)), "DRAM")
        far = station.prepare_remote(rows((there, size, 0, 1)), "DRAM")
        agent = station.agent._agent
        first = np.zeros(1, dtype=np.int32)
        handle = agent.make_prepped_xfer("WRITE", local, first, far, first, b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        handle.release()
        local.release()
        assert state == "DONE", state

    def fill(self) -> None:
        """Every page of the cache is there, and reads as zeros."""
        for tensor in self.kv_caches.values():
            tensor.zero_()

    def first_bytes(self, block: int) -> list[int]:
        """Of K of layer 0."""
        return sorted(set(self.block(block)[: self.spec.block_bytes]))


def make_engine(config: ConnectorConfig) -> RdmaEngine:
    return RdmaEngine(config, get_connector(config.connector))


def start(
    children: list[Child], engine_id: str, role: Any, connector: str = "nixl", *, make: Any = make_engine, **settings: Any
) -> Child:
    config = ConnectorConfig(
        connector=connector,
        engine_id=engine_id,
        role=role,
        withdraw_timeout_s=30.0,
        lease_heartbeat_s=2.0,
        extra=RDMA_ONLY | SLOW | settings,
    )
    return start_with(children, config, make)


def start_with(children: list[Child], config: ConnectorConfig, make: Any = make_engine) -> Child:
    child = Child(functools.partial(make, config))
    children.append(child)
    return child
