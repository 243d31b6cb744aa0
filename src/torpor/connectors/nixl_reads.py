"""The reader's end of ``nixl``: a station - an agent with a staging buffer - and a peer's memory seen from it."""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torpor.connectors.fence import HEADER_WORDS, WORD_BYTES
from torpor.connectors.geometry import Geometry
from torpor.connectors.nixl_agent import Agent, Indices, Read, Rows
from torpor.connectors.nixl_tally import Tally
from torpor.connectors.options import Options
from torpor.connectors.pins import changing_pins
from torpor.connectors.transport import BlockRead, RemoteMemory
from torpor.connectors.wire import Offer
from torpor.errors import HandshakeError, PeerError, TransportError

if TYPE_CHECKING:
    from torpor.memory import Memory

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 2.0


class Station:
    """Registered memory outside every pool, and the agent it is registered with. Serves one peer.

    staging:  array 0: slot 0 | slot 1 | ... | array 1: slot 0 | ...       (an array: K or V of one layer)
    """

    def __init__(self, name: str, ours: Geometry, kind: str, device: int, options: Options, tally: Tally | None = None) -> None:
        import torch

        block_bytes, self.arrays = ours.spec.block_bytes, 2 * ours.spec.num_layers
        self.block_bytes = block_bytes
        self.slots = max(1, min(ours.spec.num_blocks, options.staging_bytes // (self.arrays * block_bytes)))
        self.nbytes = self.slots * self.arrays * block_bytes
        self.kind, self.device = kind, device
        self._tally = tally or Tally()
        where = f"cuda:{device}" if kind == "VRAM" else "cpu"
        self._staging = torch.empty(self.nbytes, dtype=torch.uint8, device=where)
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.words = np.frombuffer(self._page, dtype=np.uint64)
        self.address = self._staging.data_ptr()
        self.flight: Read | None = None
        self._peer: str | None = None
        self._undo: deque[Callable[[], object]] = deque()  # what is left to be done until this is closed, newest first
        with changing_pins:
            self.agent = Agent(name, serves=False, tls=options.ucx_tls, backend=options.backend)
            self._register(self.address, self.nbytes, kind, device)
            self._register(self.words.ctypes.data, mmap.PAGESIZE, "DRAM", 0)
        self.blocks = self._prepare(None, rows((self.address, block_bytes, device, self.slots * self.arrays)), kind)
        self.look = self._prepare(None, rows((self.words.ctypes.data, WORD_BYTES, 0, HEADER_WORDS + 1)), "DRAM")

    def meet(self, metadata: bytes) -> None:
        """Makes a peer's memory addressable, under what its agent calls itself."""
        self._peer = self.agent.add_remote(metadata)
        self._undo.appendleft(self._forget_peer)

    def prepare_remote(self, wanted: Rows, kind: str) -> Any:
        """Descriptors in the peer's memory; NIXL needs them while a read is in flight, so they live as long as this."""
        assert self._peer is not None
        return self._prepare(self._peer, wanted, kind)

    @property
    def detached(self) -> bool:
        """Nothing of it can reach the peer any more."""
        return self._peer is None and (self.flight is None or not self.flight.in_flight)

    def fly(self, read: Read, deadline: float, who: str) -> None:
        """Waits for a read. TransportError when it fails or does not end; in that case it stays in flight."""
        self.flight = read
        if not read.wait(deadline):
            raise TransportError(f"a read from {who} did not end in time (read_timeout_s)", transport="nixl")
        self.flight = None
        self._tally.add(read.telemetry)

    def close(self) -> bool:
        """False while a read is in flight: bytes may land here and the agent must live. False also when NIXL refuses a step:
        those before it are done, the next call goes on with it. Idempotent."""
        if self.flight is not None and self.flight.in_flight:
            return False
        self.flight = None
        with changing_pins:
            while self._undo:
                try:
                    self._undo[0]()
                except Exception as error:  # NIXL's own for lists, ours for the rest
                    logger.warning("a buffer of NIXL's cannot be given up yet: %s", error)
                    return False
                self._undo.popleft()
            self.agent.close()
        return True

    def _register(self, address: int, nbytes: int, kind: str, device: int) -> None:
        registration = self.agent.register([(address, nbytes)], kind, device)
        self._undo.appendleft(lambda: self.agent.deregister(registration))

    def _prepare(self, peer: str | None, wanted: Rows, kind: str) -> Any:
        prepared = self.agent.prepare(peer, wanted, kind)
        self._undo.appendleft(prepared.release)
        return prepared

    def _forget_peer(self) -> None:
        assert self._peer is not None
        self.agent.remove_remote(self._peer)
        self._peer = None


class NixlRemote(RemoteMemory):
    def __init__(
        self,
        memory: Memory,
        ours: Geometry,
        theirs: Geometry,
        station: Station,
        offer: Offer,
        who: str,
        dispose: Callable[[Station], bool],
    ) -> None:
        """HandshakeError when the peer's metadata is none, TransportError when its memory cannot be addressed."""
        self._memory, self._ours, self._theirs = memory, ours, theirs
        self._station: Station | None = station
        self._who, self._dispose = who, dispose
        self._fence_slots = offer.fence_slots
        try:
            station.meet(offer.blob)
        except TransportError as error:
            raise HandshakeError(f"{who} sent NIXL metadata that cannot be used: {error}", peer=who) from error
        kind, device = memory_kind(offer.driver, offer.device)
        arrays = [(address, station.block_bytes, device, theirs.spec.num_blocks) for address in theirs.arrays()]
        self._blocks = station.prepare_remote(rows(*arrays), kind)
        words = rows((offer.fence_address, WORD_BYTES, 0, HEADER_WORDS + offer.fence_slots))
        self._fence = station.prepare_remote(words, "DRAM")

    def read(self, request: BlockRead, confirm: Callable[[], None]) -> int:
        station = self._live_station()
        local, remote = np.asarray(request.local, dtype=np.uint64), np.asarray(request.remote, dtype=np.int64)
        for start in range(0, len(local), station.slots):
            if request.stop():
                raise PeerError(f"{self._who} withdrew its KV cache during the read", peer=self._who)
            part = slice(start, start + station.slots)
            notice = request.notice() if start + station.slots >= len(local) else b""
            self._fetch(station, remote[part], request.deadline, notice)
            confirm()
            self._store(station, local[part], request)
        return len(local) * station.block_bytes * station.arrays

    def look(self, lease: int) -> tuple[Sequence[int], int]:
        station = self._live_station()
        words = np.append(np.arange(HEADER_WORDS), HEADER_WORDS + lease % self._fence_slots).astype(np.int32)
        here = np.arange(HEADER_WORDS + 1, dtype=np.int32)
        read = station.agent.post_read(station.look, here, self._fence, words)
        station.fly(read, time.monotonic() + LOOK_TIMEOUT_S, self._who)
        values = station.words[: HEADER_WORDS + 1].tolist()
        return values[:HEADER_WORDS], values[HEADER_WORDS]

    def close(self) -> bool:
        station, self._station = self._station, None
        return station is None or self._dispose(station)

    def _fetch(self, station: Station, blocks: Any, deadline: float, notice: bytes) -> None:
        """Remote blocks into the first slots of every array; NIXL tells the owner ``notice`` when they are there."""
        arrays = np.arange(station.arrays, dtype=np.int64)[:, None]
        here = _indices(arrays * station.slots + np.arange(len(blocks)))
        there = _indices(arrays * self._theirs.spec.num_blocks + blocks)
        station.fly(station.agent.post_read(station.blocks, here, self._blocks, there, notice), deadline, self._who)

    def _store(self, station: Station, blocks: Any, request: BlockRead) -> None:
        slots = np.arange(len(blocks), dtype=np.uint64)
        for array, dst in enumerate(self._ours.arrays()):
            src = station.address + array * station.slots * station.block_bytes
            with request.writing():
                self._memory.device.copy_blocks(dst, src, station.block_bytes, blocks, slots)

    def _live_station(self) -> Station:
        if self._station is None or self._station.flight is not None:
            raise TransportError(f"the way to {self._who} is closed", transport="nixl")
        return self._station


def memory_kind(driver: str, device: int) -> tuple[str, int]:
    """NIXL's words for where a KV cache lies, and the device's number."""
    return ("VRAM", device) if driver == "cuda" else ("DRAM", 0)


def rows(*arrays: tuple[int, int, int, int]) -> Rows:
    """(address, block bytes, device, count) each, dense."""
    return np.array([(address, size, device, size, count) for address, size, device, count in arrays], dtype=np.uint64)


def _indices(matrix: Any) -> Indices:
    return np.ascontiguousarray(matrix.reshape(-1), dtype=np.int32)
