"""The owner's end: lets readers in, and gets every one of them out again before memory goes (P2)."""

from __future__ import annotations

import enum
import logging
import threading
import time
from typing import TYPE_CHECKING

from torpor.connectors import wire
from torpor.connectors.fence import FencePage
from torpor.connectors.geometry import KV_TAG, Geometry
from torpor.connectors.guest import Guest, GuestState
from torpor.connectors.handshake import Refused
from torpor.connectors.leases import LeaseTable
from torpor.connectors.options import Options
from torpor.connectors.transport import Publication, Transport
from torpor.errors import HandshakeError, PeerError, StateError
from torpor.kvcache.types import Epoch

if TYPE_CHECKING:
    from torpor.memory import Memory

logger = logging.getLogger(__name__)

POLL_S = 0.02  # how often a release looks whether a peer that lost its connection is gone
JOIN_S = 5.0
MAX_ARRIVING = 64  # connections that have not said yet who they are


class OwnerState(enum.Enum):
    RELEASED = "released"  # nobody may read; handshakes are answered "asleep"
    SERVING = "serving"  # the present mapping is published under the present epoch
    WITHDRAWING = "withdrawing"  # the words are cleared, the peers told; handshakes are answered "asleep"
    CLOSED = "closed"  # for good


MOVES: dict[OwnerState, frozenset[OwnerState]] = {
    OwnerState.RELEASED: frozenset({OwnerState.SERVING, OwnerState.CLOSED}),
    OwnerState.SERVING: frozenset({OwnerState.WITHDRAWING, OwnerState.CLOSED}),
    OwnerState.WITHDRAWING: frozenset({OwnerState.RELEASED, OwnerState.SERVING, OwnerState.CLOSED}),
    OwnerState.CLOSED: frozenset(),
}


class Owner:
    """``serve``, ``withdraw`` and ``close`` are the engine's thread's; the rest is called by the guests' threads."""

    def __init__(
        self,
        engine_id: str,
        geometry: Geometry,
        memory: Memory,
        transport: Transport,
        fence: FencePage,
        leases: LeaseTable,
        lease_key: bytes,
        secret: bytes | None,
        options: Options,
    ) -> None:
        self._engine_id = engine_id
        self._geometry = geometry
        self._memory = memory
        self._transport = transport
        self._fence = fence
        self._leases = leases
        self._lease_key = lease_key
        self._secret = secret
        self._options = options
        self._changed = threading.Condition()
        self._state = OwnerState.RELEASED
        self._epoch: Epoch | None = None
        self._publication: Publication | None = None
        self._guests: list[Guest] = []

    @property
    def state(self) -> OwnerState:
        return self._state

    @property
    def epoch(self) -> Epoch | None:
        """Of what peers may read now."""
        return self._epoch if self._state is OwnerState.SERVING else None

    def guests(self) -> list[Guest]:
        """Peers that hold an import, or may."""
        with self._changed:
            return [guest for guest in self._guests if guest.holds]

    def serve(self, epoch: Epoch, publication: Publication) -> None:
        """From now on readers are let in, under a new epoch."""
        with self._changed:
            self._move(OwnerState.SERVING)
            self._epoch, self._publication = epoch, publication
            self._leases.open(epoch)

    def compute_with(self, geometry: Geometry) -> None:
        """KV is of other weights from now on: readers are examined by the new version. Called while released."""
        with self._changed:
            self._geometry = geometry

    def withdraw(self, deadline: float) -> None:
        """When it returns nobody reads and nobody holds anything. PeerError names whoever did not let go by the deadline (then
        ``serve`` anew). The order is the point: first the words, then the peers, then - the caller's - the memory. Idempotent."""
        with self._changed:
            if self._state is OwnerState.RELEASED:
                return
            if self._state is not OwnerState.WITHDRAWING:  # else an earlier one did not get everybody out
                self._move(OwnerState.WITHDRAWING)
            self._leases.shut()
        left = self._see_off(deadline)
        if left:
            names = ", ".join(str(guest) for guest in left)
            raise PeerError(
                f"{names} did not let go of the KV cache in time (withdraw_timeout_s): stop that engine or give it longer",
                peer=names,
                setting="withdraw_timeout_s",
            )
        with self._changed:
            self._move(OwnerState.RELEASED)
            self._epoch = self._publication = None

    def close(self, deadline: float) -> None:
        """Ends everything; whoever does not let go by the deadline is named in the log. Idempotent."""
        with self._changed:
            if self._state is OwnerState.CLOSED:
                return
            self._move(OwnerState.CLOSED)
            self._leases.shut()
        for guest in self._see_off(deadline):
            logger.warning("%s did not let go of the KV cache before the shutdown", guest)
        with self._changed:
            guests = list(self._guests)
        for guest in guests:
            guest.dismiss()
        for guest in guests:
            guest.join(JOIN_S)

    # ---- what guests ask --------------------------------------------------------------------------------------------

    def enter(self, guest: Guest) -> bool:
        """Takes note of a connection. False: closed. When many knock at once, whoever has been at the door longest gives way: a
        handshake takes milliseconds, so that is somebody who says nothing."""
        with self._changed:
            for other in self._guests:
                other.look_whether_gone()
            self._guests = [other for other in self._guests if other.state is not GuestState.GONE]
            if self._state is OwnerState.CLOSED:
                return False
            arriving = [other for other in self._guests if not other.holds]
            self._guests.append(guest)
        for other in arriving[: len(arriving) + 1 - MAX_ARRIVING]:
            other.dismiss()
        return True

    def greeting(self) -> tuple[bytes | None, str, float]:
        return self._secret, self._transport.name, self._options.handshake_timeout_s

    def examine(self, request: wire.ImportRequest, who: str) -> None:
        if request.remote_engine_id != self._engine_id:
            raise HandshakeError(
                f"this is engine {self._engine_id!r}, not {request.remote_engine_id!r}: the remote_engine_id is wrong",
                peer=who,
            )
        wire.check_compatible(self._geometry.spec, request.spec, f"engine {who!r}")

    def admit(self, guest: Guest, request: wire.ImportRequest) -> None:
        """The offer is sent under the lock, so that no withdrawal overtakes it."""
        with self._changed:
            if self._state is not OwnerState.SERVING or self._epoch is None or self._publication is None:
                raise Refused(f"engine {self._engine_id!r} has released its KV cache", peer=str(guest), reason="asleep")
            if sum(other.holds for other in self._guests) >= self._options.max_peers:
                raise Refused(
                    f"{self._options.max_peers} peers read from engine {self._engine_id!r} already (max_peers)",
                    peer=str(guest),
                    reason="busy",
                )
            grant = self._memory.export_ledger.grant(request.engine_id, KV_TAG, guest.pid)
            guest.hold(request, self._epoch, lambda: self._memory.export_ledger.end(grant))
            shared = (self._fence.fd, *self._publication.descriptors) if self._publication.descriptors else ()
            guest.send_offer(self._offer(self._epoch, self._publication, len(shared)), shared)

    def read_done(self, guest: Guest, lease: int, commitment: int) -> None:
        ended = self._leases.read_done(lease, commitment)
        if ended is not None:
            guest.blocks_read += ended.num_blocks

    def may_hold_when_lost(self, guest: Guest) -> bool:
        return not self._transport.lets_go(guest.credentials)

    def drops_the_silent(self) -> bool:
        return not self._transport.imports_hold_memory

    def changed(self) -> None:
        with self._changed:
            self._guests = [guest for guest in self._guests if guest.state is not GuestState.GONE]
            self._changed.notify_all()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _offer(self, epoch: Epoch, publication: Publication, descriptors: int) -> wire.Offer:
        regions = [
            wire.WireRegion(address=base, extents=list(extents))
            for base, extents in zip(self._geometry.bases, publication.extents, strict=True)
        ]
        return wire.Offer(
            engine_id=self._engine_id,
            epoch=str(epoch),
            spec=self._geometry.wire_spec(),
            driver=self._memory.device.driver,
            device=self._memory.config.device,
            regions=regions,
            layers=self._geometry.wire_places(),
            fence_address=self._fence.address,
            fence_slots=self._fence.slots,
            lease_key=self._lease_key,
            descriptors=descriptors,
            blob=publication.blob,
        )

    def _see_off(self, deadline: float) -> list[Guest]:
        """Asks all guests to leave and waits; those that are left at the deadline."""
        for guest in self.guests():
            guest.ask_to_leave()
        while True:
            with self._changed:
                for guest in self._guests:
                    guest.look_whether_gone()
                left = [guest for guest in self._guests if guest.holds]
                remaining = deadline - time.monotonic()
                if not left or remaining <= 0:
                    return left
                lost = any(guest.state is GuestState.LOST for guest in left)
                self._changed.wait(min(remaining, POLL_S) if lost else remaining)

    def _move(self, to: OwnerState) -> None:
        if to not in MOVES[self._state]:
            raise StateError(
                f"the KV cache is {self._state.value} to peers, it cannot become {to.value}", state=self._state.value
            )
        self._state = to
