"""``ipc``: peers on one host. The descriptors of the KV cache's extents travel over a Unix socket, the reader maps them
read-only and has the device copy blocks out of them. Nothing is copied by the owner. Device memory may be another
device's than the reader's: it is then read over NVLink or PCIe.

A reader's mapping keeps the owner's pages whatever the owner does with its own. So the owner never unmaps while one is left, and
a peer that lost its connection counts as gone only when the kernel shows that it neither maps nor has open any of our extents.
Device memory has no inode to look for. There the fence stands for it: a reader maps the fence before the extents and drops it
after them, so a process that still has the fence may still have the KV cache, and one that has not has neither.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torpor._native import BlockCopy, Import, Words
from torpor.connectors import doors, gather
from torpor.connectors.auth import load_secret
from torpor.connectors.base import KVConnector, KVConnectorScheduler, KVConnectorWorker
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.doors import Credentials, UnixDoor
from torpor.connectors.fence import FencePage, FenceView
from torpor.connectors.geometry import KV_TAG, Geometry
from torpor.connectors.options import Options
from torpor.connectors.scheduler import PullScheduler
from torpor.connectors.transport import BlockRead, Publication, RemoteMemory, Target, Transport
from torpor.connectors.wire import Offer
from torpor.connectors.worker import PullWorker
from torpor.errors import BugError, ConfigurationError, DeviceError, HandshakeError, PeerError, TransportError
from torpor.kvcache.types import KVCacheSpec
from torpor.memory.procfs import Inode, open_memfds, read_mappings

if TYPE_CHECKING:
    from torpor.memory import ExportedPool, Memory

logger = logging.getLogger(__name__)

PIECE_BYTES = {"host": 8 << 20, "cuda": 512 << 20}  # between two looks at whether to go on: some 10 ms, and 1.5 over NVLink
PATHS = {"host": "shared memory of one host", "cuda": "device memory of one host, mapped here"}


class IpcTransport(Transport):
    name: ClassVar[str] = "ipc"
    imports_hold_memory: ClassVar[bool] = True

    def __init__(self, config: ConnectorConfig, options: Options) -> None:
        if config.engine_id is None:
            raise BugError("a connector's engine_id is chosen before its sides are made")
        self._engine_id = config.engine_id
        self._folder = Path(options.socket_dir) if options.socket_dir else doors.default_socket_dir()
        self._path = doors.socket_path(self._folder, self._engine_id)
        self._way = "one host"
        self._memory: Memory  # from open() on
        self._geometry: Geometry
        self._fence: FencePage
        self._exported: ExportedPool | None = None
        self._inodes: frozenset[Inode] = frozenset()

    @property
    def path(self) -> str:
        return self._way

    def open(self, geometry: Geometry, memory: Memory, fence: FencePage) -> None:
        self._geometry, self._memory, self._fence = geometry, memory, fence
        self._way = PATHS[memory.device.driver]

    def publish(self) -> Publication:
        self.unpublish()
        exported = self._memory.exports(KV_TAG)
        descriptors = tuple(fd for region in exported.regions for fd in region.fds)
        self._exported = exported
        traces = descriptors if self._memory.device.driver == "host" else (self._fence.fd,)
        self._inodes = frozenset((status.st_dev, status.st_ino) for status in map(os.fstat, traces))
        return Publication(extents=tuple(region.extents for region in exported.regions), descriptors=descriptors)

    def unpublish(self) -> None:
        exported, self._exported = self._exported, None
        if exported is not None:
            exported.close()

    def attach(self, offer: Offer, theirs: Geometry, descriptors: Sequence[int], who: str) -> RemoteMemory:
        driver = self._memory.device.driver
        if offer.driver != driver:
            raise HandshakeError(
                f"the KV cache of {who} lies in {offer.driver!r} memory, ours in {driver!r}: both engines need the same "
                "memory driver",
                peer=who,
                setting="memory_driver",
            )
        wanted = 1 + sum(len(region.extents) for region in offer.regions)
        if len(descriptors) != wanted:
            raise HandshakeError(f"{who} sent {len(descriptors)} descriptors for {wanted} pieces of memory", peer=who)
        with contextlib.ExitStack() as undo:
            fence = undo.enter_context(contextlib.closing(FenceView(descriptors[0], offer.fence_slots)))
            imports = []
            rest = list(descriptors[1:])
            for region in offer.regions:
                part, rest = rest[: len(region.extents)], rest[len(region.extents) :]
                imports.append(undo.enter_context(self._import(part, region.extents, who)))
            remote = IpcRemote(self._memory, self._geometry, theirs.at([i.address for i in imports]), imports, fence, who)
            undo.pop_all()
            return remote

    def _import(self, descriptors: Sequence[int], sizes: Sequence[int], who: str) -> Import:
        try:
            return self._memory.device.import_extents(descriptors, sizes)
        except ConfigurationError as error:
            raise HandshakeError(f"{who} sent descriptors that cannot be mapped: {error}", peer=who) from error
        except DeviceError as error:
            raise TransportError(f"cannot map the KV cache of {who}: {error}", transport=self.name) from error

    def listen(self) -> UnixDoor:
        return UnixDoor(self._path)

    def dial(self, target: Target, timeout_s: float) -> socket.socket:
        return doors.dial_unix(doors.socket_path(self._folder, target.engine_id), f"engine {target.engine_id!r}", timeout_s)

    def where(self) -> tuple[str, int]:
        return "localhost", 0

    def lets_go(self, credentials: Credentials | None) -> bool:
        """A process that is not visible from here cannot be looked into: then the sleep report is what tells. One that cannot be
        looked into for want of descriptors has not let go as far as we know."""
        if credentials is None or credentials.pid in (0, os.getpid()):
            return True
        with contextlib.suppress(OSError):
            return _is_gone(credentials) or not self._is_held_by(credentials.pid)
        with contextlib.suppress(OSError):
            return _is_gone(credentials)
        return False

    def _is_held_by(self, pid: int) -> bool:
        """OSError when the process is gone, or cannot be looked into."""
        mapped = any(mapping.inode in self._inodes for mapping in read_mappings(pid))
        return mapped or any(inode in self._inodes for _, inode in open_memfds(pid))

    def close(self) -> None:
        self.unpublish()


def _is_gone(credentials: Credentials) -> bool:
    return doors.start_time(credentials.pid) != credentials.started


Piece = tuple[Words, Words, int, Words, Words]
"""Arguments of ``Device.copy_blocks``."""


class IpcRemote(RemoteMemory):
    """A peer's extents, mapped here read-only."""

    def __init__(
        self, memory: Memory, ours: Geometry, theirs: Geometry, imports: list[Import], fence: FenceView, who: str
    ) -> None:
        self._memory = memory
        self._block_bytes = ours.spec.block_bytes
        self._dst, self._src = (Words(array("Q", side.arrays())) for side in (ours, theirs))
        self._limits = ours.spec.num_blocks, theirs.spec.num_blocks
        self._imports = imports
        self._fence = fence
        self._who = who

    @property
    def begins(self) -> bool:
        return self._memory.device.copies_beside

    def begin(self, request: BlockRead) -> IpcRead:
        return IpcRead(self, request)

    def read(self, request: BlockRead, confirm: Callable[[], None]) -> int:
        return self.begin(request).finish(request.deadline) if self.begins else self.copy(request)

    def pieces(self, request: BlockRead) -> Iterator[Piece]:
        """What one call of the device copies, after a look at whether to go on."""
        block_bytes, most = self._block_bytes, PIECE_BYTES[self._memory.device.driver]
        local, remote = Words(request.local), Words(request.remote)
        for arrays, blocks in gather.pieces(len(self._dst), len(local), block_bytes, most):
            if request.stop():
                raise PeerError(f"the read from {self._who} was stopped", peer=self._who)
            yield self._dst.part(arrays), self._src.part(arrays), block_bytes, local.part(blocks), remote.part(blocks)

    def copy(self, request: BlockRead) -> int:
        """Piece by piece; the bytes of all."""
        for piece in self.pieces(request):
            self.check_in_time(request.deadline)
            with request.writing():
                self._memory.device.copy_blocks(*piece, limits=self._limits)
        return self.nbytes(request)

    def begin_copy(self, piece: Piece) -> BlockCopy:
        return self._memory.device.begin_copy_blocks(*piece, limits=self._limits)

    def check_in_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TransportError(f"the read from {self._who} took longer than read_timeout_s", transport="ipc")

    def nbytes(self, request: BlockRead) -> int:
        return len(request.local) * self._block_bytes * len(self._dst)

    def look(self, lease: int) -> tuple[Sequence[int], int]:
        return self._fence.look(lease)

    def close(self) -> bool:
        """False when the driver did not let an import go: call it again. The fence stays with it, to be seen by the owner."""
        self._imports = [imported for imported in self._imports if not self._dropped(imported)]
        if not self._imports:
            self._fence.close()
        return not self._imports

    def _dropped(self, imported: Import) -> bool:
        try:
            imported.close()
        except DeviceError as error:
            logger.warning("the driver does not let go of the memory of %s: %s", self._who, error)
            return False
        return True


class IpcRead:
    """A read whose first pieces the device copies while others run. Two are on their way at most: the next begins before the
    one before it is waited for, so the device is never idle in between."""

    def __init__(self, remote: IpcRemote, request: BlockRead) -> None:
        self._remote, self._request = remote, request
        self._pieces = remote.pieces(request)
        with contextlib.ExitStack() as writing:
            writing.enter_context(request.writing())
            self._flying = deque(writing.enter_context(remote.begin_copy(piece)) for piece in islice(self._pieces, 2))
            self._writing = writing.pop_all()

    def finish(self, deadline: float) -> int:
        with self._writing as writing:
            self._request.meanwhile()
            for piece in self._pieces:
                self._remote.check_in_time(deadline)
                self._flying.append(writing.enter_context(self._remote.begin_copy(piece)))
                self._flying.popleft().close()
        return self._remote.nbytes(self._request)


class IpcConnector(KVConnector):
    """Registered as ``ipc``. Options in ``extra``: ``socket_dir`` (the same on both engines) and those all transports have."""

    supports_sleep_mode: ClassVar[bool] = True
    supports_weight_updates: ClassVar[bool] = True

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        options = _options(config)
        load_secret(config.secret_file)
        if options.socket_dir is not None:
            doors.make_private_folder(doors.socket_path(Path(options.socket_dir), "any").parent)
        return cls

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return PullScheduler(config, spec)

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = _options(config)
        return PullWorker(config, spec, IpcTransport(config, options), options)


def _options(config: ConnectorConfig) -> Options:
    return Options.of(config, known={"socket_dir"})
