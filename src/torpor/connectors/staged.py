"""What ``nixl`` and ``mooncake`` share: bytes arrive in a staging buffer of the reader's own, are checked against the owner's
fence, and only then copied into the KV cache.

The reader registers nothing that sleeps. A read that never ends can so do no harm: its buffer is set aside until it does.
"""

from __future__ import annotations

import abc
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from torpor.connectors.config import ConnectorConfig
from torpor.connectors.fence import FencePage
from torpor.connectors.geometry import Geometry
from torpor.connectors.options import Options
from torpor.connectors.pins import changing_pins
from torpor.connectors.transport import BlockRead, RemoteMemory, TcpTransport
from torpor.connectors.wire import Offer
from torpor.errors import PeerError, TransportError

if TYPE_CHECKING:
    from torpor.memory import Memory

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 2.0  # of a read of the owner's fence
Blocks = npt.NDArray[np.uint64]

_unended: list[Station] = []  # with a read in flight when their transport closed: bytes may still land there


class Flight(Protocol):
    """A read on its way. Giving up on it does not end it."""

    @property
    def in_flight(self) -> bool: ...

    def wait(self, deadline: float) -> bool:
        """True when it is done, False when it is still in flight at the deadline. TransportError when it failed."""
        ...


class Station(abc.ABC):
    """Registered memory outside every pool. Serves one peer at a time. The constructor registers, under ``changing_pins``.

    staging:  array 0: slot 0 | slot 1 | ... | array 1: slot 0 | ...       (an array: K or V of one layer)
    """

    transport: ClassVar[str]

    def __init__(self, ours: Geometry, staging_bytes: int, where: str = "cpu") -> None:
        """``where``: torch's name of the device that the staging buffer is on."""
        import torch

        self.block_bytes, self.arrays = ours.spec.block_bytes, 2 * ours.spec.num_layers
        self.slots = max(1, min(ours.spec.num_blocks, staging_bytes // (self.arrays * self.block_bytes)))
        self.nbytes = self.slots * self.arrays * self.block_bytes
        self._staging = torch.empty(self.nbytes, dtype=torch.uint8, device=where)
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.address = self._staging.data_ptr()
        self.words = np.frombuffer(self._page, dtype=np.uint64)  # for the owner's fence
        self.flight: Any = None  # a Flight

    @property
    @abc.abstractmethod
    def detached(self) -> bool:
        """Nothing of it can reach the peer any more."""

    def end(self, flight: Flight, deadline: float, who: str) -> None:
        """Waits for a read. TransportError when it fails or does not end; in that case it stays in flight."""
        self.flight = flight
        if not flight.wait(deadline):
            raise TransportError(f"a read from {who} did not end in time (read_timeout_s)", transport=self.transport)
        self.flight = None

    def close(self) -> bool:
        """False while a read is in flight: bytes may land here. False also when the transport refuses a step; the next call goes
        on with it. Idempotent."""
        if self.flight is not None and self.flight.in_flight:
            return False
        self.flight = None
        with changing_pins:
            return self._give_up()

    @abc.abstractmethod
    def _give_up(self) -> bool:
        """Deregisters. Idempotent."""


AnyStation = TypeVar("AnyStation", bound=Station)


class StagedRemote(RemoteMemory, Generic[AnyStation]):
    """A peer's memory seen from a station."""

    transport: ClassVar[str]

    def __init__(
        self,
        memory: Memory,
        ours: Geometry,
        theirs: Geometry,
        station: AnyStation,
        offer: Offer,
        who: str,
        dispose: Callable[[AnyStation], bool],
    ) -> None:
        self._memory, self._ours, self._theirs = memory, ours, theirs
        self._station: AnyStation | None = station
        self._who, self._dispose = who, dispose
        self._fence_slots = offer.fence_slots

    def read(self, request: BlockRead, confirm: Callable[[], None]) -> int:
        station = self._live_station()
        local, remote = np.array(request.local, dtype=np.uint64), np.array(request.remote, dtype=np.uint64)
        for start in range(0, len(local), station.slots):
            if request.stop():
                raise PeerError(f"{self._who} withdrew its KV cache during the read", peer=self._who)
            part = slice(start, start + station.slots)
            self._fetch(station, remote[part], request, start + station.slots >= len(local))
            confirm()
            self._store(station, local[part], request)
        return len(local) * station.block_bytes * station.arrays

    @abc.abstractmethod
    def _fetch(self, station: AnyStation, blocks: Blocks, request: BlockRead, last: bool) -> None:
        """Remote blocks into the first slots of every array. ``last``: none of the request come after them."""

    @abc.abstractmethod
    def _store(self, station: AnyStation, blocks: Blocks, request: BlockRead) -> None:
        """The first slots of every array into these blocks of ours."""

    def close(self) -> bool:
        station, self._station = self._station, None
        return station is None or self._dispose(station)

    def _live_station(self) -> AnyStation:
        if self._station is None or self._station.flight is not None:
            raise TransportError(f"the way to {self._who} is closed", transport=self.transport)
        return self._station


class StagedTransport(TcpTransport, Generic[AnyStation]):
    """Has a station made before the first peer is met, and sets those aside whose reads do not end."""

    imports_hold_memory: ClassVar[bool] = False
    stages: ClassVar[bool] = True

    def __init__(self, config: ConnectorConfig, options: Options) -> None:
        super().__init__(config)
        self._options = options
        self._memory: Memory  # from open() on
        self._geometry: Geometry
        self._lock = threading.Lock()
        self._spare: AnyStation | None = None
        self._set_aside: list[AnyStation] = []

    def open(self, geometry: Geometry, memory: Memory, fence: FencePage) -> None:
        self._geometry, self._memory = geometry, memory
        if self._config.role != "producer":
            self._spare = self._new_station()
        if self._config.role != "consumer":
            self._open_owner(fence)

    @abc.abstractmethod
    def _open_owner(self, fence: FencePage) -> None:
        """Makes what peers will read from, and registers the fence with it."""

    @abc.abstractmethod
    def _close_owner(self) -> None:
        """Nothing is published any more. Idempotent."""

    @abc.abstractmethod
    def _new_station(self) -> AnyStation: ...

    @abc.abstractmethod
    def _reach(self, station: AnyStation, offer: Offer, theirs: Geometry, who: str) -> RemoteMemory:
        """HandshakeError for an offer that cannot be right, TransportError."""

    def attach(self, offer: Offer, theirs: Geometry, descriptors: Sequence[int], who: str) -> RemoteMemory:
        with self._lock:
            station, self._spare = self._spare, None
        station = station or self._new_station()
        try:
            return self._reach(station, offer, theirs, who)
        except BaseException:
            self._dispose(station)
            raise

    def _dispose(self, station: AnyStation) -> bool:
        """Closes a station, or sets it aside while a read of it is in flight, or the transport does not let its buffer go.
        Whether nothing of it can reach the peer any more."""
        with changing_pins, self._lock:  # in this order: a release holds the first
            stations, self._set_aside = [*self._set_aside, station], []
            self._set_aside = [s for s in stations if not s.close()]
            if not station.detached:
                logger.warning("a read does not end: its buffer is set aside (%d of them now)", len(self._set_aside))
            return station.detached

    def close(self) -> None:
        try:
            self.unpublish()
        finally:
            with changing_pins, self._lock:
                stations = [*self._set_aside, *([self._spare] if self._spare is not None else [])]
                self._spare, self._set_aside = None, []
                _unended.extend(s for s in stations if not s.close())
            self._close_owner()
