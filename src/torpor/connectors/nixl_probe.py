"""Which way NIXL's bytes go, found by measuring: NIXL and UCX choose in silence, and the wrong way is a hundred times slower.

On an H200, virtual memory of CUDA's (all that can sleep) was read at 0.4 GB/s whatever UCX was told, memory of cudaMalloc at 8,
and an imported mapping at 370: UCX stages what it cannot map through host memory, and nothing warns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torpor.connectors.geometry import Geometry
from torpor.connectors.nixl_agent import Agent
from torpor.connectors.nixl_reads import Station, rows
from torpor.connectors.options import Options

if TYPE_CHECKING:
    from torpor.memory import Memory

PROBE_BYTES = 4 << 20
LEAST_BYTES = 1 << 20  # of less, only latencies would be seen
PROBE_TIMEOUT_S = 5.0
SLOWER = 10  # times than the device's own copies: then something lies in between


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes per second of the same blocks: read through NIXL, and copied by the device as ``ipc`` would."""

    nbytes: int
    read_rate: float
    copy_rate: float

    @property
    def slow(self) -> bool:
        return self.read_rate * SLOWER < self.copy_rate

    def __str__(self) -> str:
        return (
            f"{self.nbytes / 2**20:.1f} MiB of this KV cache were read at {self.read_rate / 1e9:.2g} GB/s; "
            f"the device copies them at {self.copy_rate / 1e9:.2g}"
        )


_unended: list[tuple[Agent, Station]] = []  # whose read never ended: their agents must live


def probe(name: str, memory: Memory, geometry: Geometry, kind: str, device: int, options: Options) -> Probe | None:
    """Reads blocks of our own KV cache from one agent of this process to another, which takes 0.1 s. None when the cache is too
    small to tell. TransportError."""
    if _count(geometry) * geometry.spec.block_bytes < LEAST_BYTES:
        return None
    owner = Agent(f"{name}-probed", serves=True, tls=options.ucx_tls, backend=options.backend)
    station = Station(f"{name}-probe", geometry, kind, device, options)
    try:
        return _measure(memory, geometry, owner, station)
    finally:
        if station.close():
            owner.close()
        else:
            _unended.append((owner, station))


def _measure(memory: Memory, geometry: Geometry, owner: Agent, station: Station) -> Probe:
    count, block_bytes, source = _count(geometry), geometry.spec.block_bytes, geometry.arrays()[0]
    nbytes = count * block_bytes
    registration = owner.register([(source, nbytes)], station.kind, station.device)
    station.meet(owner.metadata())
    there = station.prepare_remote(rows((source, block_bytes, station.device, count)), station.kind)
    blocks = np.arange(count, dtype=np.uint64)

    def read() -> None:
        indices = blocks.astype(np.int32)
        posted = station.agent.post_read(station.blocks, indices, there, indices)
        station.fly(posted, time.monotonic() + PROBE_TIMEOUT_S, "this process")

    def copy() -> None:
        memory.device.copy_blocks(station.address, source, block_bytes, blocks, blocks)

    measured = Probe(nbytes, nbytes / _best_s(read), nbytes / _best_s(copy))
    owner.deregister(registration)
    return measured


def _count(geometry: Geometry) -> int:
    return min(geometry.spec.num_blocks, PROBE_BYTES // geometry.spec.block_bytes)


def _best_s(work: Callable[[], None]) -> float:
    """Of two runs; one before them connects, and brings in what is needed."""
    work()
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
