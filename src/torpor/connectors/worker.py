"""The worker side of ``ipc`` and ``nixl``: one owner's end and one reader's end around one transport."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torpor.connectors import geometry as geometries
from torpor.connectors import wire
from torpor.connectors.auth import exposure, load_secret
from torpor.connectors.base import ConnectorMetadata, ConnectorStats, Finished, KVConnectorWorker, PeerStats
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.descriptors import make_room
from torpor.connectors.fence import FencePage, new_lease_key
from torpor.connectors.geometry import KV_TAG, Geometry
from torpor.connectors.leases import LeaseTable
from torpor.connectors.options import Options
from torpor.connectors.owner import Owner, OwnerState
from torpor.connectors.pins import NoPins, PinWatch
from torpor.connectors.reader import Reader
from torpor.connectors.reception import Reception
from torpor.connectors.transport import Transport
from torpor.errors import BugError, StateError, TorporError
from torpor.kvcache.types import Epoch, KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.memory import Memory

logger = logging.getLogger(__name__)

MIN_LEASE_SLOTS = 1024


@functools.cache
def _warn_if_exposed(secret_file: str | None) -> None:
    """Once a process, however many workers share the file."""
    if secret_file is not None and (exposed := exposure(secret_file)) is not None:
        logger.warning("%s", exposed)


class PullWorker(KVConnectorWorker):
    """Registered: served under ``epoch()``. Released: not served, and nobody holds anything. In between only after a failure: not
    served, but a peer or the transport may hold something; a release goes on from there, a restore begins anew."""

    def __init__(
        self,
        config: ConnectorConfig,
        spec: KVCacheSpec,
        transport: Transport,
        options: Options,
        *,
        pins: PinWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.engine_id is None:
            raise BugError("a connector's engine_id is chosen before its sides are made")
        self._config = config
        self._spec = spec
        self._transport = transport
        self._options = options
        self._pins = pins or PinWatch()
        self._settle: Callable[[], None] = _nothing  # waits until the device has done all that it was asked to
        self._secret = load_secret(config.secret_file)
        _warn_if_exposed(config.secret_file)
        self._clock = clock
        self._tell: Callable[[], None] = _nothing
        self._epoch: Epoch | None = None  # of the last registration
        self._registered = False
        self._may_be_held = False  # by the transport or by a peer: true from the first publication until a release succeeded
        self._release_s = self._restore_s = 0.0  # what the last ones took
        self._memory: Memory | None = None  # whose KV cache is registered
        self._geometry: Geometry | None = None
        self._fence: FencePage | None = None
        self._leases: LeaseTable | None = None
        self._owner: Owner | None = None
        self._reader: Reader | None = None
        self._reception: Reception | None = None

    # ---- start and end ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec, memory: Memory) -> None:
        if self._geometry is not None:
            raise StateError("the KV cache is registered already", state="registered")
        pieces = sum(tag.resident_bytes for tag in memory.stats().tags if tag.tag == KV_TAG) // memory.config.extent_bytes
        self._memory = memory
        make_room(2 * pieces)  # those that are published, and as many while it is looked at or published anew
        with memory.exports(KV_TAG) as exported:
            self._geometry = geometries.of_tensors(kv_caches, spec, exported)
        if memory.device.driver != "host":
            self._pins = NoPins()
            # All streams of the process, whichever the engine computes on; our own copies among them, which take milliseconds.
            self._settle = memory.device.synchronize
        self._pins.tell = lambda nbytes: memory.note_pins(KV_TAG, self, nbytes)
        try:
            self._fence = FencePage(max(MIN_LEASE_SLOTS, spec.num_blocks))
            self._transport.open(self._geometry, memory, self._fence)
            self._reader = Reader(
                self._engine_id,
                self._geometry,
                self._transport,
                self._secret,
                self._options,
                self._config.lease_heartbeat_s,
                self._tell,
            )
            self._start_serving(memory, self._fence)
        except BaseException:
            self.shutdown()
            raise

    def _start_serving(self, memory: Memory, fence: FencePage) -> None:
        if self._config.role != "consumer":
            assert self._geometry is not None
            key = new_lease_key()
            self._leases = LeaseTable(fence, key, self._clock)
            self._owner = Owner(
                self._engine_id, self._geometry, memory, self._transport, fence, self._leases, key, self._secret, self._options
            )
            door = self._transport.listen()
            self._reception = Reception(door, self._owner, self._options.handshake_timeout_s)
        self._publish(Epoch.first())

    def shutdown(self) -> None:
        deadline = self._deadline()
        with contextlib.suppress(TorporError):
            if self._owner is not None:
                self._owner.close(deadline)
        if self._reception is not None:
            self._reception.close()
        if self._reader is not None:
            self._reader.close(deadline)
        try:
            self._deregister(self._transport.close)
        except TorporError as error:
            logger.warning("closing the transport: %s", error)
        if self._fence is not None:
            self._fence.close()
        self._registered = False

    # ---- steps ------------------------------------------------------------------------------------------------------

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """On a GPU it waits for the device's work of before: what is handed off must be written before its word stands in the
        fence, and the blocks that a load fills must not be in use by a step that was only begun."""
        if metadata.hand_offs or any(load.local_block_ids for load in metadata.loads):
            self._settle()
        for hand_off in metadata.hand_offs:
            if self._leases is None:
                raise BugError(f"a hand-off of request {hand_off.request_id} at an engine that only reads")
            self._leases.grant(hand_off)
        for load in metadata.loads:
            self._live_reader.submit(load)
        for request_id in metadata.cancelled:
            self._live_reader.cancel(request_id)

    def set_weights_version(self, version: str) -> None:
        """Connections end with a release, so every peer meets the new version in its next handshake."""
        if version == self._spec.model_id:
            return
        if self._may_be_held or self._geometry is None or self._reader is None:
            raise StateError(
                "the weights' version cannot change while peers are served under the old one: put kv_cache to sleep first",
                state="registered" if self._registered else "new",
            )
        self._geometry = self._geometry.of_weights(version)
        self._spec = self._geometry.spec
        self._reader.compute_with(self._geometry)
        if self._owner is not None:
            self._owner.compute_with(self._geometry)

    def tell_when_finished(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def get_finished(self) -> Finished:
        finished = self._live_reader.take_finished()
        self._take_notices()
        sending = self._leases.take_ended() if self._leases is not None else frozenset()
        return Finished(sending=sending, recving=finished.recving, failed=finished.failed)

    def _take_notices(self) -> None:
        """Of reads that have ended. A connection that breaks right after one leaves no other word of it."""
        try:
            notices = self._transport.take_notices()
        except TorporError as error:
            logger.debug("%s", error)
            return
        for notice in notices:
            told = wire.parse_read_notice(notice)
            if told is not None and self._leases is not None:
                self._leases.note_arrived(*told)

    # ---- sleep and wake ---------------------------------------------------------------------------------------------

    def release_kv_caches(self) -> None:
        if self._may_be_held:
            begun = time.monotonic()
            try:
                self._release()
            finally:
                self._release_s = time.monotonic() - begun

    def _release(self) -> None:
        deadline = self._deadline()
        try:
            self._live_reader.release(deadline)
            if self._owner is not None:
                self._owner.withdraw(deadline)
                self._registered = False
                self._deregister(self._transport.unpublish)
            elif self._transport.stages:
                self._pins.explain()
                self._tell_pins()
        except TorporError as error:
            error.fields["undo_failures"] = self._serve_again()
            raise
        self._registered = self._may_be_held = False

    def _deregister(self, let_go: Callable[[], None]) -> None:
        """P4a. What the transport keeps pinned for itself is told to the memory layer, which knows pins by their sum only."""
        with self._pins.deregistering():
            let_go()
        self._tell_pins()

    def _tell_pins(self) -> None:
        if self._memory is not None:
            self._memory.explain_pins(self._pins.explained_bytes)

    def restore_kv_caches(self) -> None:
        if not self._registered:
            if self._epoch is None:
                raise StateError("register_kv_caches comes first", state="new")
            begun = time.monotonic()
            try:
                self._publish(self._epoch.next())
            finally:
                self._restore_s = time.monotonic() - begun

    def _publish(self, epoch: Epoch) -> None:
        """Everything or nothing; a new epoch each time, also after a failure."""
        self._epoch = epoch
        if self._owner is not None:
            assert self._geometry is not None
            self._may_be_held = True
            with self._pins.registering(self._geometry.nbytes):
                publication = self._transport.publish()
            self._owner.serve(epoch, publication)
        self._live_reader.admit()
        self._registered = self._may_be_held = True

    def _serve_again(self) -> tuple[str, ...]:
        """After a release that failed: nothing was unmapped, so peers that were sent away may come back, under a new epoch. What
        kept that from working, if anything did."""
        assert self._epoch is not None
        if self._owner is not None and self._owner.state is OwnerState.SERVING:  # it was the reader's end that failed
            self._live_reader.admit()
            return ()
        try:
            self._publish(self._epoch.next())
        except TorporError as error:
            self._registered = False
            logger.error("the KV cache is served to nobody until the next wake: %s", error)
            return (str(error),)
        return ()

    # ---- how it is --------------------------------------------------------------------------------------------------

    def epoch(self) -> Epoch | None:
        return self._epoch if self._registered else None

    def get_handshake_metadata(self) -> dict[str, Any] | None:
        epoch = self.epoch()
        if epoch is None:
            return None
        host, port = self._transport.where() if self._owner is not None else ("", 0)
        return {"engine_id": self._engine_id, "epoch": str(epoch), "host": host, "port": port}

    def stats(self) -> ConnectorStats:
        reader, epoch = self._reader, self.epoch()
        serving = self._owner is not None and self._owner.state is OwnerState.SERVING
        return ConnectorStats(
            connector=self._transport.name,
            engine_id=self._engine_id,
            path=self._transport.path,
            epoch=str(epoch) if epoch is not None else None,
            registered_bytes=self._geometry.nbytes if serving and self._geometry is not None else 0,
            pending_hand_offs=len(self._leases) if self._leases is not None else 0,
            loads_in_flight=reader.loads_in_flight if reader is not None else 0,
            loads_done=reader.loads_done if reader is not None else 0,
            loads_failed=reader.loads_failed if reader is not None else 0,
            bytes_received=reader.bytes_received if reader is not None else 0,
            peers=tuple(self._peers()),
            transfers=self._transport.transfers(),
            release_s=self._release_s,
            restore_s=self._restore_s,
        )

    def _peers(self) -> list[PeerStats]:
        guests = self._owner.guests() if self._owner is not None else []
        block = 2 * self._spec.num_layers * self._spec.block_bytes
        readers = [
            PeerStats(peer=str(g), direction="reads from us", epoch=str(g.epoch), leases=1, bytes=g.blocks_read * block)
            for g in guests
        ]
        return readers + (self._reader.peers() if self._reader is not None else [])

    @property
    def _engine_id(self) -> str:
        return str(self._config.engine_id)

    @property
    def _live_reader(self) -> Reader:
        if self._reader is None:
            raise StateError("register_kv_caches comes first", state="new")
        return self._reader

    def _deadline(self) -> float:
        return time.monotonic() + self._config.withdraw_timeout_s


def _nothing() -> None:
    return
