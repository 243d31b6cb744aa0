"""``mooncake``: blocks are read one-sided through Mooncake's transfer engine, over TCP or RDMA.

The owner registers its pool's regions at every mapping and unregisters them before every unmap. Mooncake has no generation of its
own, and peers keep what they learned of a segment: the epoch in the fence is what tells one mapping from the next, and peers are
gone before memory goes. The reader registers nothing that sleeps: bytes arrive in a staging buffer of its own in host memory, are
checked against the owner's fence, and only then copied into the KV cache.

Protocol ``rdma`` needs an RDMA device that the kernel knows (``/sys/class/infiniband``), the system's libibverbs with a provider
for it, and a locked-memory limit as large as the KV cache; ``device_name`` is the device's (``mlx5_0``, several with commas).
``kv_host`` is then the address of that network. Engines of both sides need the same protocol.

Mooncake's own ports listen on every address of the machine and ask nobody who he is: whoever reaches them can read what is
registered. Use it in a network where everybody is trusted.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from torpor.connectors.auth import check_host, load_secret
from torpor.connectors.base import KVConnector, KVConnectorScheduler, KVConnectorWorker
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.fence import FencePage
from torpor.connectors.geometry import Geometry
from torpor.connectors.mooncake_engine import Engine, borrow_engine, check_protocol, load_package, return_engine
from torpor.connectors.mooncake_reads import Handle, MooncakeRemote, Station, same_bytes
from torpor.connectors.options import Options
from torpor.connectors.pins import changing_pins
from torpor.connectors.scheduler import PullScheduler
from torpor.connectors.staged import StagedTransport
from torpor.connectors.transport import Publication, RemoteMemory
from torpor.connectors.wire import Offer
from torpor.connectors.worker import PullWorker
from torpor.errors import BugError, ConnectorError, TransportError
from torpor.kvcache.types import KVCacheSpec
from torpor.memory.procfs import pinned_bytes

if TYPE_CHECKING:
    from torpor.memory import Memory

logger = logging.getLogger(__name__)

OPTIONS = {"protocol", "device_name", "staging_bytes"}


class MooncakeTransport(StagedTransport[Station]):
    name: ClassVar[str] = "mooncake"

    def __init__(self, config: ConnectorConfig, options: Options) -> None:
        super().__init__(config, options)
        check_protocol(options.protocol, options.device_name)
        self._where = (config.host, options.protocol, options.device_name)
        self._path = f"Mooncake, {options.protocol}"
        self._engine: Engine | None = None
        self._published: list[int] = []  # regions registered now

    @property
    def path(self) -> str:
        return self._path

    def open(self, geometry: Geometry, memory: Memory, fence: FencePage) -> None:
        load_package()
        super().open(geometry, memory, fence)
        if memory.device.driver != "host" and self._engine is not None:
            self._prove(self._engine)

    def _open_owner(self, fence: FencePage) -> None:
        with changing_pins:
            before = pinned_bytes()
            self._engine = borrow_engine(*self._where)
            self._engine.register(fence.address, fence.nbytes)
            self._look_at_pins(pinned_bytes() - before)

    def _close_owner(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            return_engine(engine, *self._where)

    def _look_at_pins(self, pinned: int) -> None:
        """An RDMA region pins its pages; TCP pins none. Mooncake does not say which it took."""
        if self._options.protocol == "rdma" and pinned <= 0:
            self._path += " (no page was pinned: it may have taken TCP)"
            logger.warning("%s", self._path)

    def _prove(self, engine: Engine) -> None:
        """Not every build of Mooncake reads device memory: one block of ours is read once, before anybody depends on it."""
        address, nbytes = self._geometry.arrays()[0], self._geometry.spec.block_bytes
        right = np.empty(nbytes, dtype=np.uint8)
        self._memory.device.copy("to_host", [(right.ctypes.data, address, nbytes)])
        station = self._new_station()
        try:
            engine.register(self._geometry.bases[0], self._geometry.sizes[0])
            same = same_bytes(station, engine.segment, address, right)
            engine.unregister(self._geometry.bases[0])
        except TransportError as error:
            raise _unreadable() from error
        finally:
            self._dispose(station)
        if not same:
            raise _unreadable()

    def publish(self) -> Publication:
        self.unpublish()
        engine = self._live_engine
        try:
            for address, nbytes in zip(self._geometry.bases, self._geometry.sizes, strict=True):
                engine.register(address, nbytes)
                self._published.append(address)
        except TransportError:
            with contextlib.suppress(TransportError):  # it is tried again by the next unpublish
                self.unpublish()
            raise
        handle = Handle(segment=engine.segment, protocol=self._options.protocol)
        return Publication(extents=tuple((size,) for size in self._geometry.sizes), blob=msgspec.msgpack.encode(handle))

    def unpublish(self) -> None:
        while self._published:
            self._live_engine.unregister(self._published[-1])
            self._published.pop()

    def _reach(self, station: Station, offer: Offer, theirs: Geometry, who: str) -> RemoteMemory:
        return MooncakeRemote(self._memory, self._geometry, theirs, station, offer, self._options.protocol, who, self._dispose)

    def _new_station(self) -> Station:
        return Station(self._config.host, self._geometry, self._options)

    @property
    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise BugError("only an owner publishes, between open() and close()")
        return self._engine


def _unreadable() -> ConnectorError:
    return ConnectorError(
        "this build of Mooncake cannot read the device memory that the KV cache lies in: install the one for your CUDA "
        "(mooncake-transfer-engine, mooncake-transfer-engine-cuda13), or use another --kv-connector",
        connector="mooncake",
        setting="kv_connector",
    )


class MooncakeConnector(KVConnector):
    """Registered as ``mooncake``. Options in ``extra``: ``protocol``, ``device_name``, ``staging_bytes``, and those that all
    transports have."""

    supports_sleep_mode: ClassVar[bool] = True
    supports_weight_updates: ClassVar[bool] = True

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        Options.of(config, known=OPTIONS)
        check_host(config.host, load_secret(config.secret_file))
        return cls

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return PullScheduler(config, spec, dials_hosts=True)

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known=OPTIONS)
        return PullWorker(config, spec, MooncakeTransport(config, options), options)
