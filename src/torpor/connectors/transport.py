"""What a transport is to the two ends: how memory becomes known to peers, and how a peer's blocks get here.

Everything else - who may, until when, whether what was read is right - is the same for all transports and not their business.
"""

from __future__ import annotations

import abc
import socket
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from torpor.connectors.auth import check_host, load_secret
from torpor.connectors.base import TransferStats
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.doors import Credentials, Door, TcpDoor, dial_tcp
from torpor.connectors.fence import FencePage
from torpor.connectors.geometry import Geometry
from torpor.connectors.wire import Offer
from torpor.errors import BugError

if TYPE_CHECKING:
    from torpor.memory import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a peer needs beyond the geometry. Descriptors stay the transport's; they are sent, not given away."""

    extents: tuple[tuple[int, ...], ...]  # sizes, per region
    descriptors: tuple[int, ...] = ()
    blob: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a peer is said to be. Untrusted until the handshake."""

    engine_id: str
    host: str
    port: int


class BlockRead(msgspec.Struct, frozen=True, kw_only=True):
    """``remote[i]`` of the peer's blocks goes to ``local[i]`` of ours. ``writing`` is entered around every write into our KV
    cache and raises once the load was cancelled."""

    local: array[int]  # of type "q", as the next one
    remote: array[int]
    writing: Callable[[], AbstractContextManager[None]]
    stop: Callable[[], bool]  # true when the read should end early
    deadline: float  # time.monotonic()
    # For the owner when all has arrived, where the transport can take it along. Waits for the hash of the prompt.
    notice: Callable[[], bytes] = bytes
    meanwhile: Callable[[], object] = bytes  # work of the caller's own, best done while bytes are on their way


class Reading(Protocol):
    """A read that has begun."""

    def finish(self, deadline: float) -> int:
        """The rest of ``RemoteMemory.read``, on any thread. Called once, whatever became of the load meanwhile: what has begun
        counts as a write under way until then. ``deadline`` takes the request's place: others may have had their turns since."""
        ...


class RemoteMemory(abc.ABC):
    """A peer's KV cache of one epoch, as far as we can reach it. Used by one thread at a time, but for ``begin`` and ``look``,
    which may be called beside a read that has begun, and never beside ``close``."""

    @property
    def begins(self) -> bool:
        """Whether ``begin`` is there."""
        return False

    def begin(self, request: BlockRead) -> Reading:
        """Begins a read without waiting for anything: the engine's thread calls. Nobody has looked at whether the blocks lie in
        both caches: it does, before anything is copied. What ``read`` raises."""
        raise NotImplementedError

    @abc.abstractmethod
    def read(self, request: BlockRead, confirm: Callable[[], None]) -> int:
        """Copies blocks into our KV cache; the bytes moved. ``confirm`` is the P3 check: a transport that stages bytes calls it
        before it lets any into the KV cache; the caller calls it once more at the end. TransportError, PeerError, or what
        ``writing`` raises."""

    @abc.abstractmethod
    def look(self, lease: int) -> tuple[Sequence[int], int]:
        """The owner's fence, now: its header and the word of a lease. TransportError when it cannot be read."""

    @abc.abstractmethod
    def close(self) -> bool:
        """Drops mappings and remote handles. False: something is left that could touch the owner, or holds its memory.
        Idempotent; after a False a driver that refused is asked again."""


class Transport(abc.ABC):
    """One per worker. ``open``, ``publish``, ``unpublish`` and ``close`` are called by the engine's thread, ``attach`` by the
    readers'."""

    name: ClassVar[str]
    imports_hold_memory: ClassVar[bool]  # a peer's import keeps our pages from the device for as long as the peer keeps it
    # What it reads arrives in memory of its own, outside every pool: the reader's KV cache is never made known to the device.
    stages: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def path(self) -> str:
        """Which way the bytes go, in words."""

    @abc.abstractmethod
    def open(self, geometry: Geometry, memory: Memory, fence: FencePage) -> None:
        """Once, outside every pool. Registers nothing of the KV cache."""

    @abc.abstractmethod
    def publish(self) -> Publication:
        """Makes the present mapping of the KV cache known to the transport. TransportError: then nothing is registered."""

    @abc.abstractmethod
    def unpublish(self) -> None:
        """Undoes ``publish``. Idempotent. TransportError when the transport still holds something."""

    @abc.abstractmethod
    def attach(self, offer: Offer, theirs: Geometry, descriptors: Sequence[int], who: str) -> RemoteMemory:
        """The descriptors stay the caller's. HandshakeError for an offer that cannot be right, TransportError."""

    @abc.abstractmethod
    def listen(self) -> Door: ...

    @abc.abstractmethod
    def dial(self, target: Target, timeout_s: float) -> socket.socket: ...

    @abc.abstractmethod
    def where(self) -> tuple[str, int]:
        """Host and port for ``kv_transfer_params``; valid after ``listen``."""

    def take_notices(self) -> list[bytes]:
        """What peers sent along with reads that have ended, since the last call. The engine's thread calls it at every step."""
        return []

    def transfers(self) -> TransferStats | None:
        """What the transport tells of its reads. Any thread."""
        return None

    def lets_go(self, credentials: Credentials | None) -> bool:
        """Whether a peer whose connection was lost can hold none of our memory any more."""
        return True

    @abc.abstractmethod
    def close(self) -> None: ...


class TcpTransport(Transport):
    """Peers meet on ``kv_host`` and ``kv_port``."""

    def __init__(self, config: ConnectorConfig) -> None:
        """ConfigurationError for a host that others reach and no secret."""
        check_host(config.host, load_secret(config.secret_file))
        self._config = config
        self._door: TcpDoor | None = None

    def listen(self) -> TcpDoor:
        self._door = TcpDoor(self._config.host, self._config.port)
        return self._door

    def dial(self, target: Target, timeout_s: float) -> socket.socket:
        return dial_tcp(target.host, target.port, f"engine {target.engine_id!r}", timeout_s)

    def where(self) -> tuple[str, int]:
        if self._door is None:
            raise BugError("the port is known after listen()")
        return self._config.host, self._door.port
