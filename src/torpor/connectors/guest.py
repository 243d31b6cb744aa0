"""One reader at the owner: its connection, what it holds, and the thread that listens to it."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torpor.connectors import wire
from torpor.connectors.channel import MAX_DESCRIPTORS, Channel
from torpor.connectors.doors import Credentials
from torpor.connectors.handshake import Refused, checked, expect, receive_greeting, refuse
from torpor.errors import PeerError, TorporError
from torpor.kvcache.types import Epoch

logger = logging.getLogger(__name__)

SILENT_BEATS = 10  # heartbeats missed in a row until a peer counts as silent


class GuestState(enum.Enum):
    ARRIVING = "arriving"  # not identified, holds nothing
    HOLDING = "holding"  # was offered the KV cache of one epoch; has it imported or is about to
    LOST = "lost"  # its connection broke; whether it still holds anything is not known yet
    GONE = "gone"  # holds nothing: said so, never got anything, or was seen to be dead


MOVES: dict[GuestState, frozenset[GuestState]] = {
    GuestState.ARRIVING: frozenset({GuestState.HOLDING, GuestState.GONE}),
    GuestState.HOLDING: frozenset({GuestState.LOST, GuestState.GONE}),
    GuestState.LOST: frozenset({GuestState.GONE}),
    GuestState.GONE: frozenset(),
}


class Host(Protocol):
    """What a guest needs of the owner."""

    def greeting(self) -> tuple[bytes | None, str, float]:
        """Shared secret, transport, and seconds for the handshake."""
        ...

    def examine(self, request: wire.ImportRequest, who: str) -> None:
        """HandshakeError when this peer cannot read from us."""
        ...

    def admit(self, guest: Guest, request: wire.ImportRequest) -> None:
        """Refused, or the guest holds an import afterwards."""
        ...

    def read_done(self, guest: Guest, lease: int, commitment: int) -> None: ...

    def may_hold_when_lost(self, guest: Guest) -> bool: ...

    def drops_the_silent(self) -> bool: ...

    def changed(self) -> None: ...


class Guest:
    """The state is changed by ``_move`` alone, under the guest's lock."""

    def __init__(self, host: Host, channel: Channel, credentials: Credentials | None) -> None:
        self.credentials = credentials
        self.epoch: Epoch | None = None
        self.blocks_read = 0
        self._host = host
        self._channel = channel
        self._name = ""
        self._state = GuestState.ARRIVING
        self._silence_s = 60.0
        self._end_grant: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"torpor-kv-guest {channel.peer}", daemon=True)

    def __str__(self) -> str:
        return f"{self._name} ({self._channel.peer})" if self._name else self._channel.peer

    @property
    def state(self) -> GuestState:
        return self._state

    @property
    def holds(self) -> bool:
        """It has an import of ours, or may have."""
        return self._state in (GuestState.HOLDING, GuestState.LOST)

    @property
    def pid(self) -> int | None:
        return self.credentials.pid or None if self.credentials is not None else None

    def start(self) -> None:
        """Where the system has no thread left, the guest is gone before it came."""
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("nobody can look after %s: %s", self, error)
            self._channel.close()
            with self._lock:
                self._move(GuestState.GONE)
            self._host.changed()

    def hold(self, request: wire.ImportRequest, epoch: Epoch, end_grant: Callable[[], None]) -> None:
        with self._lock:
            self._name = request.engine_id
            self.epoch = epoch
            self._silence_s = request.heartbeat_s * SILENT_BEATS
            self._end_grant = end_grant
            self._move(GuestState.HOLDING)

    def send_offer(self, offer: wire.Offer, descriptors: Sequence[int]) -> None:
        self._channel.send(offer)
        for start in range(0, len(descriptors), MAX_DESCRIPTORS):
            part = descriptors[start : start + MAX_DESCRIPTORS]
            self._channel.send(wire.Descriptors(count=len(part)), part)

    def ask_to_leave(self) -> None:
        """Sends the withdrawal. A peer that cannot be told has lost its connection."""
        epoch = self.epoch
        if self._state is not GuestState.HOLDING or epoch is None:
            return
        try:
            self._channel.send(wire.Withdraw(epoch=str(epoch)))
        except PeerError as error:
            logger.warning("%s cannot be told to let go: %s", self, error)
            self._channel.abort()

    def look_whether_gone(self) -> None:
        with self._lock:
            if self._state is GuestState.LOST and not self._host.may_hold_when_lost(self):
                self._move(GuestState.GONE)

    def dismiss(self) -> None:
        """Ends the connection, whatever it holds."""
        self._channel.abort()

    def join(self, timeout_s: float) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        left = False
        try:
            self._arrive()
            left = self._listen()
        except Refused as error:
            logger.warning("refused %s: %s", self, error)
            refuse(self._channel, error)
        except TorporError as error:
            logger.info("%s: %s", self, error)
        finally:
            self._channel.close()
            with self._lock:
                stays = self._state is GuestState.HOLDING and not left
                self._move(GuestState.LOST if stays else GuestState.GONE)
            self.look_whether_gone()
            self._host.changed()

    def _arrive(self) -> None:
        secret, transport, timeout_s = self._host.greeting()
        deadline = time.monotonic() + timeout_s
        receive_greeting(self._channel, secret, transport, deadline)
        request, _ = expect(self._channel, wire.ImportRequest, deadline)
        checked(self._channel, lambda: self._host.examine(request, request.engine_id), "spec")
        self._host.admit(self, request)

    def _listen(self) -> bool:
        """Until the peer leaves: True. PeerError when it breaks off, talks nonsense, or is silent where that matters."""
        while True:
            received = self._channel.receive(self._silence_s)
            if received is None:
                if self._host.drops_the_silent():
                    raise PeerError(f"{self} has been silent for {self._silence_s:g} s", peer=str(self))
                continue
            message = received[0]
            if isinstance(message, wire.ReadDone):
                self._host.read_done(self, message.lease, int.from_bytes(message.commitment, "big"))
            elif isinstance(message, wire.Goodbye):
                return True
            elif isinstance(message, wire.Withdrawn):
                # Only the epoch it was offered: an answer about another one says nothing about this import.
                if message.epoch == str(self.epoch):
                    return True
            elif not isinstance(message, wire.Ping):
                raise PeerError(f"{self} sent {type(message).__name__} where none is due", peer=str(self))

    def _move(self, to: GuestState) -> None:
        if to not in MOVES[self._state]:
            raise AssertionError(f"guest {self} cannot go from {self._state.value} to {to.value}")
        self._state = to
        if to is GuestState.GONE:
            self._end_grant()
