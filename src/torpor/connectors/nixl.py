"""``nixl``: blocks are read one-sided through NIXL (UCX), over RDMA, TCP, or between processes of one host.

The owner registers its pool's regions at every mapping and deregisters them before every unmap. The reader registers nothing that
sleeps: bytes arrive in a staging buffer of its own, are checked against the owner's fence, and only then copied into the KV
cache. A read that never ends - UCX has no way to stop one, its bytes land even after its handle and its peer were removed - can
so do no harm: its agent and buffer are set aside until it ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from typing import TYPE_CHECKING, ClassVar

from torpor.connectors.auth import check_host, is_loopback, load_secret
from torpor.connectors.base import KVConnector, KVConnectorScheduler, KVConnectorWorker, TransferStats
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.fence import FencePage
from torpor.connectors.geometry import Geometry
from torpor.connectors.nixl_agent import UCX, Agent
from torpor.connectors.nixl_probe import Probe, probe
from torpor.connectors.nixl_reads import NixlRemote, Station, memory_kind
from torpor.connectors.nixl_registrations import Registrations
from torpor.connectors.nixl_settings import check_tls
from torpor.connectors.nixl_tally import Tally
from torpor.connectors.options import Options
from torpor.connectors.scheduler import PullScheduler
from torpor.connectors.staged import StagedTransport
from torpor.connectors.transport import Publication, RemoteMemory
from torpor.connectors.wire import Offer
from torpor.connectors.worker import PullWorker
from torpor.errors import BugError, TransportError
from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    from torpor.memory import Memory

logger = logging.getLogger(__name__)


class NixlTransport(StagedTransport[Station]):
    name: ClassVar[str] = "nixl"

    def __init__(self, config: ConnectorConfig, options: Options) -> None:
        if config.engine_id is None:
            raise BugError("a connector's engine_id is chosen before its sides are made")
        super().__init__(config, options)
        # NIXL keeps what it knows of a name: a restarted engine must not meet it with its old one.
        self._agent_name = f"{config.engine_id}-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._agent: Agent | None = None
        self._fence: FencePage  # from open() on
        self._unguarded = False  # while asleep the KV cache's range is a hole
        self._registrations: Registrations | None = None  # of self._agent
        self._tally = Tally()
        self._probe: Probe | None = None

    @property
    def path(self) -> str:
        chosen = self._options.ucx_tls or "(it chooses the transport)"
        return f"NIXL, {self._options.backend} {chosen}" + (f": {self._probe}" if self._probe is not None else "")

    def open(self, geometry: Geometry, memory: Memory, fence: FencePage) -> None:
        self._fence, self._unguarded = fence, memory.device.driver != "host"
        super().open(geometry, memory, fence)
        self._measure()

    def _open_owner(self, fence: FencePage) -> None:
        self._agent = self._new_agent()

    def _measure(self) -> None:
        """Says once which way the bytes go. A probe that fails keeps nobody from starting: what it meets, a load would meet."""
        try:
            self._probe = probe(self._agent_name, self._memory, self._geometry, *self._kind(), self._options)
        except TransportError as error:
            logger.warning("NIXL could not read a probe of the KV cache: %s", error)
        if self._probe is None:
            return
        if self._probe.slow and is_loopback(self._config.host):
            logger.warning("%s: for engines of one host --kv-connector ipc is faster", self.path)
        else:
            logger.info("%s", self.path)

    def publish(self) -> Publication:
        self.unpublish()
        self._agent = self._agent or self._new_agent()
        self._registrations = Registrations(self._agent, *self._kind())
        self._registrations.add(list(zip(self._geometry.bases, self._geometry.sizes, strict=True)))
        try:
            blob = self._agent.metadata()
        except TransportError:
            with contextlib.suppress(TransportError):  # it is tried again by the next unpublish
                self.unpublish()
            raise
        return Publication(extents=tuple((size,) for size in self._geometry.sizes), blob=blob)

    def unpublish(self) -> None:
        """Device memory has no guard (P4): its agent goes with the registration. UCX emulates one-sided reads inside this process
        and takes addresses that CUDA does not know any more for the host's, so a late read would end it by SIGSEGV."""
        if self._registrations is None or self._agent is None:
            return
        self._registrations.drop()
        self._registrations = None
        if self._unguarded:
            self._close_owner()

    def _close_owner(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _reach(self, station: Station, offer: Offer, theirs: Geometry, who: str) -> RemoteMemory:
        return NixlRemote(self._memory, self._geometry, theirs, station, offer, who, self._dispose)

    def _kind(self) -> tuple[str, int]:
        return memory_kind(self._memory.device.driver, self._memory.config.device)

    def _new_agent(self) -> Agent:
        """That owns: peers read our fence, and what is registered later."""
        name = f"{self._agent_name}-{next(self._numbers)}"
        agent = Agent(name, serves=True, tls=self._options.ucx_tls, backend=self._options.backend)
        agent.register([(self._fence.address, self._fence.nbytes)], "DRAM", 0)
        return agent

    def _new_station(self) -> Station:
        kind, device = self._kind()
        name = f"{self._agent_name}-r{next(self._numbers)}"
        return Station(name, self._geometry, kind, device, self._options, self._tally)

    def take_notices(self) -> list[bytes]:
        """Nobody else takes them out of NIXL, where a peer could let them pile up."""
        if self._agent is None:
            return []
        notices = self._agent.take_notices()
        self._tally.note(len(notices))
        return notices

    def transfers(self) -> TransferStats:
        return self._tally.snapshot()


class NixlConnector(KVConnector):
    """Registered as ``nixl``. Options in ``extra``: ``ucx_tls``, ``backend``, ``staging_bytes``, and those all transports have.

    Sleep is for UCX, whose registrations were proven to follow the mapping. Another plugin of NIXL's serves engines that stay
    awake.
    """

    supports_sleep_mode: ClassVar[bool] = True
    supports_weight_updates: ClassVar[bool] = True

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        check_host(config.host, load_secret(config.secret_file))
        return cls if _options(config).backend == UCX else _AwakeOnly

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return PullScheduler(config, spec, dials_hosts=True)

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = _options(config)
        return PullWorker(config, spec, NixlTransport(config, options), options)


class _AwakeOnly(NixlConnector):
    """Over a backend that was not proven to let go."""

    supports_sleep_mode: ClassVar[bool] = False


def _options(config: ConnectorConfig) -> Options:
    options = Options.of(config, known={"ucx_tls", "backend", "staging_bytes"})
    check_tls(options.ucx_tls)
    return options
