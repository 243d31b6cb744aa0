"""The reader's end of ``mooncake``: a station - an engine with a staging buffer - and a peer's memory seen from it."""

from __future__ import annotations

import logging
import mmap
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from torpor.connectors import staged
from torpor.connectors.fence import HEADER_WORDS, WORD_BYTES, word_offset
from torpor.connectors.geometry import Geometry
from torpor.connectors.mooncake_engine import Engine, Flight, borrow_engine, return_engine
from torpor.connectors.options import Options
from torpor.connectors.pins import changing_pins
from torpor.connectors.staged import LOOK_TIMEOUT_S, Blocks, StagedRemote
from torpor.connectors.transport import BlockRead
from torpor.connectors.wire import Offer
from torpor.errors import HandshakeError, TransportError

if TYPE_CHECKING:
    from torpor.memory import Memory

logger = logging.getLogger(__name__)

_SEGMENT = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}:\d{1,5}")

Addresses = npt.NDArray[np.uint64]


class Handle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an owner publishes: where its engine is, and what it speaks."""

    segment: str
    protocol: str


def decode_handle(blob: bytes, protocol: str, who: str) -> Handle:
    """HandshakeError for anything that is not a handle, or one of another protocol than ours."""
    try:
        handle = msgspec.msgpack.decode(blob, type=Handle)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"{who} sent Mooncake metadata that cannot be used: {error}", peer=who) from error
    if not _SEGMENT.fullmatch(handle.segment):
        raise HandshakeError(f"{who} sent {handle.segment[:64]!r} for the name of a Mooncake segment", peer=who)
    if handle.protocol != protocol:
        raise HandshakeError(
            f"{who} speaks Mooncake's {handle.protocol!r}, we speak {protocol!r}: both engines need the same protocol",
            peer=who,
            setting="protocol",
        )
    return handle


class Station(staged.Station):
    """In host memory, with the engine that it is registered with."""

    transport: ClassVar[str] = "mooncake"

    def __init__(self, host: str, ours: Geometry, options: Options) -> None:
        super().__init__(ours, options.staging_bytes)
        self._where = (host, options.protocol, options.device_name)
        with changing_pins:
            self.engine: Engine | None = borrow_engine(*self._where)
            try:
                self.engine.register(self.address, self.nbytes)
                self.engine.register(self.words.ctypes.data, mmap.PAGESIZE)
            except TransportError:
                self._give_up()  # an engine that is forgotten would be destroyed
                raise

    @property
    def detached(self) -> bool:
        """Registered memory of ours reaches nobody by itself: a read does, for as long as it is in flight."""
        return self.flight is None

    def fly(self, peer: str, local: Addresses, remote: Addresses, sizes: Addresses, deadline: float, who: str) -> None:
        """Reads, and waits as ``end`` does."""
        engine = self.engine
        if engine is None:
            raise TransportError(f"the way to {who} is closed", transport="mooncake")
        self.end(Flight(lambda: engine.read(peer, local.tolist(), remote.tolist(), sizes.tolist())), deadline, who)

    def _give_up(self) -> bool:
        if self.engine is not None:
            try:
                return_engine(self.engine, *self._where)
            except TransportError as error:
                logger.warning("a buffer of Mooncake's cannot be given up yet: %s", error)
                return False
            self.engine = None
        return True


class MooncakeRemote(StagedRemote[Station]):
    transport: ClassVar[str] = "mooncake"

    def __init__(
        self,
        memory: Memory,
        ours: Geometry,
        theirs: Geometry,
        station: Station,
        offer: Offer,
        protocol: str,
        who: str,
        dispose: Callable[[Station], bool],
    ) -> None:
        """``protocol``: ours. HandshakeError for an offer of another, or of what is no handle."""
        super().__init__(memory, ours, theirs, station, offer, who, dispose)
        self._peer = decode_handle(offer.blob, protocol, who).segment
        self._arrays = np.array(theirs.arrays(), dtype=np.uint64)
        self._fence = offer.fence_address

    def look(self, lease: int) -> tuple[Sequence[int], int]:
        station = self._live_station()
        here = station.words.ctypes.data
        header = HEADER_WORDS * WORD_BYTES
        local = np.array([here, here + header], dtype=np.uint64)
        remote = np.array([self._fence, self._fence + word_offset(lease, self._fence_slots)], dtype=np.uint64)
        sizes = np.array([header, WORD_BYTES], dtype=np.uint64)
        station.fly(self._peer, local, remote, sizes, time.monotonic() + LOOK_TIMEOUT_S, self._who)
        values = station.words[: HEADER_WORDS + 1].tolist()
        return values[:HEADER_WORDS], values[HEADER_WORDS]

    def _fetch(self, station: Station, blocks: Blocks, request: BlockRead, last: bool) -> None:
        """Neighbours go in one slice. Nothing tells the owner."""
        size = np.uint64(station.block_bytes)
        firsts = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] + np.uint64(7)) != 1)
        counts = np.diff(firsts, append=len(blocks)).astype(np.uint64)
        array_starts = np.arange(station.arrays, dtype=np.uint64)[:, None] * np.uint64(station.slots) * size
        here = np.uint64(station.address) + array_starts + firsts.astype(np.uint64) * size
        there = self._arrays[:, None] + blocks[firsts] * size
        sizes = np.broadcast_to(counts * size, here.shape)
        station.fly(self._peer, here.reshape(-1), there.reshape(-1), sizes.reshape(-1), request.deadline, self._who)

    def _store(self, station: Station, blocks: Blocks, request: BlockRead) -> None:
        size = np.uint64(station.block_bytes)
        slots = np.arange(len(blocks), dtype=np.uint64) * size
        for array, dst in enumerate(self._ours.arrays()):
            src = np.uint64(station.address + array * station.slots * station.block_bytes)
            spans = np.stack([np.uint64(dst) + blocks * size, src + slots, np.full(len(blocks), size, dtype=np.uint64)], axis=1)
            with request.writing():
                self._memory.device.copy("to_device", spans)


def same_bytes(station: Station, peer: str, remote: int, right: Any) -> bool:
    """Whether a read of ``remote`` brings what is there, into a buffer that held something else."""
    buffer = station._staging.numpy()[: len(right)]
    buffer[:] = ~right
    one = np.array([remote], dtype=np.uint64)
    sizes = np.array([len(right)], dtype=np.uint64)
    here = np.array([station.address], dtype=np.uint64)
    station.fly(peer, here, one, sizes, time.monotonic() + LOOK_TIMEOUT_S, "this process")
    return bool((buffer == right).all())
