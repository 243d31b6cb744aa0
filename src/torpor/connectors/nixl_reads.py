"""The reader's end of ``nixl``: a station - an agent with a staging buffer - and a peer's memory seen from it."""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from torpor.connectors import staged
from torpor.connectors.fence import HEADER_WORDS, WORD_BYTES
from torpor.connectors.geometry import Geometry
from torpor.connectors.nixl_agent import Agent, Indices, Read, Rows
from torpor.connectors.nixl_tally import Tally
from torpor.connectors.options import Options
from torpor.connectors.pins import changing_pins
from torpor.connectors.staged import LOOK_TIMEOUT_S, Blocks, StagedRemote
from torpor.connectors.transport import BlockRead
from torpor.connectors.wire import Offer
from torpor.errors import HandshakeError, TransportError

if TYPE_CHECKING:
    from torpor.memory import Memory

logger = logging.getLogger(__name__)


class Station(staged.Station):
    """With the agent that it is registered with. Serves one peer."""

    transport: ClassVar[str] = "nixl"

    def __init__(self, name: str, ours: Geometry, kind: str, device: int, options: Options, tally: Tally | None = None) -> None:
        super().__init__(ours, options.staging_bytes, f"cuda:{device}" if kind == "VRAM" else "cpu")
        self.kind, self.device = kind, device
        self._tally = tally or Tally()
        self._peer: str | None = None
        self._undo: deque[Callable[[], object]] = deque()  # what is left to be done until this is closed, newest first
        with changing_pins:
            self.agent = Agent(name, serves=False, tls=options.ucx_tls, backend=options.backend)
            self._register(self.address, self.nbytes, kind, device)
            self._register(self.words.ctypes.data, mmap.PAGESIZE, "DRAM", 0)
        self.blocks = self._prepare(None, rows((self.address, self.block_bytes, device, self.slots * self.arrays)), kind)
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
        return self._peer is None and (self.flight is None or not self.flight.in_flight)

    def fly(self, read: Read, deadline: float, who: str) -> None:
        self.end(read, deadline, who)
        self._tally.add(read.telemetry)

    def _give_up(self) -> bool:
        """Nothing may be in flight, or the owner could die of it. What NIXL refuses comes first in the next call."""
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


class NixlRemote(StagedRemote[Station]):
    transport: ClassVar[str] = "nixl"

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
        super().__init__(memory, ours, theirs, station, offer, who, dispose)
        try:
            station.meet(offer.blob)
        except TransportError as error:
            raise HandshakeError(f"{who} sent NIXL metadata that cannot be used: {error}", peer=who) from error
        kind, device = memory_kind(offer.driver, offer.device)
        arrays = [(address, station.block_bytes, device, theirs.spec.num_blocks) for address in theirs.arrays()]
        self._blocks = station.prepare_remote(rows(*arrays), kind)
        words = rows((offer.fence_address, WORD_BYTES, 0, HEADER_WORDS + offer.fence_slots))
        self._fence = station.prepare_remote(words, "DRAM")

    def look(self, lease: int) -> tuple[Sequence[int], int]:
        station = self._live_station()
        words = np.append(np.arange(HEADER_WORDS), HEADER_WORDS + lease % self._fence_slots).astype(np.int32)
        here = np.arange(HEADER_WORDS + 1, dtype=np.int32)
        read = station.agent.post_read(station.look, here, self._fence, words)
        station.fly(read, time.monotonic() + LOOK_TIMEOUT_S, self._who)
        values = station.words[: HEADER_WORDS + 1].tolist()
        return values[:HEADER_WORDS], values[HEADER_WORDS]

    def _fetch(self, station: Station, blocks: Blocks, request: BlockRead, last: bool) -> None:
        """NIXL tells the owner the request's notice when they are there."""
        arrays = np.arange(station.arrays, dtype=np.int64)[:, None]
        here = _indices(arrays * station.slots + np.arange(len(blocks)))
        there = _indices(arrays * self._theirs.spec.num_blocks + blocks.astype(np.int64))
        notice = request.notice() if last else b""
        station.fly(station.agent.post_read(station.blocks, here, self._blocks, there, notice), request.deadline, self._who)

    def _store(self, station: Station, blocks: Blocks, request: BlockRead) -> None:
        slots = np.arange(len(blocks), dtype=np.uint64)
        for array, dst in enumerate(self._ours.arrays()):
            src = station.address + array * station.slots * station.block_bytes
            with request.writing():
                self._memory.device.copy_blocks(dst, src, station.block_bytes, blocks, slots)


def memory_kind(driver: str, device: int) -> tuple[str, int]:
    """NIXL's words for where a KV cache lies, and the device's number."""
    return ("VRAM", device) if driver == "cuda" else ("DRAM", 0)


def rows(*arrays: tuple[int, int, int, int]) -> Rows:
    """(address, block bytes, device, count) each, dense."""
    return np.array([(address, size, device, size, count) for address, size, device, count in arrays], dtype=np.uint64)


def _indices(matrix: Any) -> Indices:
    return np.ascontiguousarray(matrix.reshape(-1), dtype=np.int32)
