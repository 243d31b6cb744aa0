"""What faulty connectors are made of: sound ones whose worker, transport or scheduler can be exchanged."""

from __future__ import annotations

from typing import ClassVar

from torpor.connectors.base import KVConnectorScheduler, KVConnectorWorker
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.ipc import IpcConnector, IpcTransport
from torpor.connectors.options import Options
from torpor.connectors.scheduler import PullScheduler
from torpor.connectors.worker import PullWorker
from torpor.kvcache.types import KVCacheSpec
from torpor.testing.connectors import PinnedConnector
from torpor.testing.connectors.pinned import PinnedTransport


class FaultyPinned(PinnedConnector):
    """``worker``, ``transport`` and ``scheduler`` are what it is made of."""

    worker: ClassVar[type[PullWorker]] = PullWorker
    transport: ClassVar[type[PinnedTransport]] = PinnedTransport
    scheduler: ClassVar[type[PullScheduler]] = PullScheduler

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return cls.scheduler(config, spec)

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"socket_dir"})
        return cls.worker(config, spec, cls.transport(config, options), options)


class FaultyIpc(IpcConnector):
    worker: ClassVar[type[PullWorker]] = PullWorker
    transport: ClassVar[type[IpcTransport]] = IpcTransport

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"socket_dir"})
        return cls.worker(config, spec, cls.transport(config, options), options)
