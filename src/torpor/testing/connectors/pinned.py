"""A connector for the engines of one process whose registrations pin pages in the kernel (``torpor.testing.pinned``).

It stands where RDMA stands, on any Linux machine: what is published stays reachable, and held, until it is unpublished, whatever
happens to the mapping. A read goes through the owner's registration into a buffer of the reader's, and is copied to the KV cache
when the fence says that it is right.

The kernel counts pins by process (VmPin), and so do a release and the report of a sleep: one engine of a process can hand over,
the others read.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from torpor.connectors import doors
from torpor.connectors.base import KVConnector, KVConnectorScheduler, KVConnectorWorker, Reach
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.doors import UnixDoor
from torpor.connectors.fence import FencePage, FenceView
from torpor.connectors.geometry import Geometry
from torpor.connectors.options import Options
from torpor.connectors.scheduler import PullScheduler
from torpor.connectors.transport import BlockRead, Publication, RemoteMemory, Target, Transport
from torpor.connectors.wire import Offer
from torpor.connectors.worker import PullWorker
from torpor.errors import BugError, HandshakeError, PeerError, TransportError
from torpor.kvcache.types import KVCacheSpec
from torpor.testing.pinned import MAX_BUFFER_BYTES, PinnedRegistration
from torpor.testing.unfollowed import UnfollowedWorker

if TYPE_CHECKING:
    from torpor.memory import Memory


class Registered:
    """A range of memory as several pins, since the kernel limits one. Reads are serialised: a ring has one thread."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self._lock = address, threading.Lock()
        self._pins: list[PinnedRegistration] = []
        try:
            for start in range(0, nbytes, MAX_BUFFER_BYTES):
                self._pins.append(PinnedRegistration(address + start, min(MAX_BUFFER_BYTES, nbytes - start)))
        except OSError as error:
            self.close()
            raise TransportError(f"cannot pin {nbytes} bytes: {error}", transport="pinned") from error

    def read(self, offset: int, nbytes: int) -> bytes:
        """TransportError once it is closed: the key of a region that was deregistered opens nothing."""
        parts = []
        with self._lock:
            while nbytes > 0:
                index, inside = divmod(offset, MAX_BUFFER_BYTES)
                length = min(nbytes, MAX_BUFFER_BYTES - inside)
                if index >= len(self._pins):
                    raise TransportError("the registration is gone, or ends before that", transport="pinned")
                parts.append(self._pins[index].remote_read(inside, length))
                offset, nbytes = offset + length, nbytes - length
        return b"".join(parts)

    def close(self) -> None:
        with self._lock:
            while self._pins:
                self._pins.pop().close()


class PinnedTransport(Transport):
    name: ClassVar[str] = "pinned"
    imports_hold_memory: ClassVar[bool] = False
    owners: ClassVar[dict[str, PinnedTransport]] = {}  # of this process, by engine id

    def __init__(self, config: ConnectorConfig, options: Options) -> None:
        if config.engine_id is None:
            raise BugError("a connector's engine_id is chosen before its sides are made")
        self._engine_id = config.engine_id
        self._folder = Path(options.socket_dir) if options.socket_dir else doors.default_socket_dir()
        self._memory: Memory  # from open() on
        self._geometry: Geometry
        self.fence: FencePage
        self.regions: list[Registered] = []

    @property
    def path(self) -> str:
        return "pages of this process, pinned"

    def open(self, geometry: Geometry, memory: Memory, fence: FencePage) -> None:
        if memory.device.driver != "host":
            raise TransportError("pins are for memory of the host driver", transport=self.name)
        self._geometry, self._memory, self.fence = geometry, memory, fence

    def publish(self) -> Publication:
        self.unpublish()
        geometry = self._geometry
        try:
            for base, size in zip(geometry.bases, geometry.sizes, strict=True):
                self.regions.append(Registered(base, size))
        except TransportError:
            self.unpublish()
            raise
        self.owners[self._engine_id] = self
        return Publication(extents=tuple((size,) for size in geometry.sizes))

    def unpublish(self) -> None:
        self.owners.pop(self._engine_id, None)
        while self.regions:
            self.regions.pop().close()

    def attach(self, offer: Offer, theirs: Geometry, descriptors: Sequence[int], who: str) -> RemoteMemory:
        owner = self.owners.get(offer.engine_id)
        if owner is None:
            raise HandshakeError(f"{who} has no registration in this process: pinned connects engines of one", peer=who)
        fence = FenceView(owner.fence.fd, offer.fence_slots)
        return PinnedRemote(self._memory, self._geometry, theirs, list(owner.regions), fence, who)

    def listen(self) -> UnixDoor:
        return UnixDoor(doors.socket_path(self._folder, self._engine_id))

    def dial(self, target: Target, timeout_s: float) -> socket.socket:
        return doors.dial_unix(doors.socket_path(self._folder, target.engine_id), f"engine {target.engine_id!r}", timeout_s)

    def where(self) -> tuple[str, int]:
        return "localhost", 0

    def close(self) -> None:
        self.unpublish()


class PinnedRemote(RemoteMemory):
    """The keys of a peer's registrations."""

    def __init__(
        self, memory: Memory, ours: Geometry, theirs: Geometry, regions: list[Registered], fence: FenceView, who: str
    ) -> None:
        self._memory, self._ours, self._theirs = memory, ours, theirs
        self._regions = regions
        self._fence = fence
        self._who = who

    def read(self, request: BlockRead, confirm: Callable[[], None]) -> int:
        size = self._ours.spec.block_bytes
        lanes = list(zip(self._ours.arrays(), self._theirs.arrays(), strict=True))
        for here, there in zip(map(int, request.local), map(int, request.remote), strict=True):
            if request.stop():
                raise PeerError(f"{self._who} withdrew its KV cache during the read", peer=self._who)
            if time.monotonic() > request.deadline:
                raise TransportError(f"the read from {self._who} took longer than read_timeout_s", transport="pinned")
            block = [self._at(theirs + there * size, size) for _, theirs in lanes]
            confirm()
            with request.writing():
                self._write([ours + here * size for ours, _ in lanes], block)
        return len(request.local) * size * len(lanes)

    def _at(self, address: int, nbytes: int) -> bytes:
        for region, base, size in zip(self._regions, self._theirs.bases, self._theirs.sizes, strict=True):
            if base <= address and address + nbytes <= base + size:
                return region.read(address - base, nbytes)
        raise TransportError(f"{self._who} has registered nothing at {address:#x}", transport="pinned")

    def _write(self, addresses: Sequence[int], block: Sequence[bytes]) -> None:
        for address, piece in zip(addresses, block, strict=True):
            staged = np.frombuffer(piece, dtype=np.uint8)
            self._memory.device.copy("to_device", [(int(address), int(staged.ctypes.data), len(piece))])

    def look(self, lease: int) -> tuple[Sequence[int], int]:
        return self._fence.look(lease)

    def close(self) -> bool:
        self._regions = []
        self._fence.close()
        return True


class PinnedConnector(KVConnector):
    """Options in ``extra``: ``socket_dir`` and those that ``ipc`` and ``nixl`` share. Needs io_uring."""

    supports_sleep_mode: ClassVar[bool] = True
    supports_weight_updates: ClassVar[bool] = True
    reach: ClassVar[Reach] = "process"

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return PullScheduler(config, spec)

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"socket_dir"})
        return PullWorker(config, spec, PinnedTransport(config, options), options)


class UnfollowedPinned(PinnedConnector):
    """What it registered outlives the mapping: after a sleep and a wake peers read the old bytes, and memory is held twice. That
    is what an RDMA region does that nobody deregisters."""

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"socket_dir"})
        return UnfollowedWorker(config, spec, PinnedTransport(config, options), options)
