"""Connectors that declare to follow the KV cache's mapping and do not: they reproduce the fault that torpor exists to exclude.
Never use them for anything else.

``release_kv_caches`` tells nobody and deregisters nothing; ``restore_kv_caches`` registers nothing anew and makes no new epoch.
So a sleep unmaps pages that a peer still has, and the peer goes on reading them. With ``ipc`` the peer's loads succeed with what
the pages held before the sleep, and the memory is held twice after the wake. With ``nixl`` over TCP UCX reads inside the owner's
process: a late read touches the hole where the KV cache was, and the owner dies by SIGSEGV. That takes a pool without its guard
(P4). Over device memory UCX reads inside the owner whatever it is told, with the same end. With ``mooncake`` over RDMA the peer
reads the old pages, as with ``ipc``; over TCP a read of the hole fails, and after the wake one succeeds with what the new pages
hold.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from torpor.connectors.base import KVConnectorWorker
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.fence import FencePage
from torpor.connectors.geometry import Geometry
from torpor.connectors.ipc import IpcConnector, IpcTransport
from torpor.connectors.mooncake import OPTIONS as MOONCAKE_OPTIONS
from torpor.connectors.mooncake import MooncakeConnector, MooncakeTransport
from torpor.connectors.nixl import NixlConnector, NixlTransport
from torpor.connectors.options import Options
from torpor.connectors.worker import PullWorker
from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    from torpor.memory import Memory


class UnfollowedWorker(PullWorker):
    """Its registration outlives the mapping it covers."""

    def release_kv_caches(self) -> None:
        return

    def restore_kv_caches(self) -> None:
        return


class UnfollowedIpc(IpcConnector):
    guarded: ClassVar[bool] = False

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"socket_dir"})
        return UnfollowedWorker(config, spec, IpcTransport(config, options), options)


class OwnerReads(NixlTransport):
    """Host memory goes over TCP unless ``ucx_tls`` says otherwise: that is where the owner's process does the copying."""

    def open(self, geometry: Geometry, memory: Memory, fence: FencePage) -> None:
        if self._options.ucx_tls is None and memory.device.driver == "host":
            self._options = dataclasses.replace(self._options, ucx_tls="tcp")
        super().open(geometry, memory, fence)


class UnfollowedNixl(NixlConnector):
    guarded: ClassVar[bool] = False

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"ucx_tls", "staging_bytes"})
        return UnfollowedWorker(config, spec, OwnerReads(config, options), options)


class UnfollowedMooncake(MooncakeConnector):
    guarded: ClassVar[bool] = False

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known=MOONCAKE_OPTIONS)
        return UnfollowedWorker(config, spec, MooncakeTransport(config, options), options)
