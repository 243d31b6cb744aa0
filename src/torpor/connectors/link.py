"""The reader's end of one connection, which is one import of one epoch of one peer. It lives as long as the import does."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from torpor.connectors import wire
from torpor.connectors.channel import Channel, close_descriptors
from torpor.connectors.descriptors import make_room
from torpor.connectors.fence import Verdict, heard, judge
from torpor.connectors.geometry import Geometry, of_offer
from torpor.connectors.handshake import expect, greet
from torpor.connectors.loads import Load
from torpor.connectors.options import Options
from torpor.connectors.transport import BlockRead, Reading, RemoteMemory, Target, Transport
from torpor.connectors.uses import Uses
from torpor.errors import HandshakeError, PeerError, StaleEpochError
from torpor.kvcache.types import Epoch

logger = logging.getLogger(__name__)

JOIN_S = 5.0
DROP_NAPS_S = (0.01, 0.05, 0.2, 0.5, 1.0)  # between attempts to drop an import that the driver does not let go


class Link:
    """Made by ``connect``. Reads end on the puller's thread; its own thread hears the owner, also while we sleep."""

    def __init__(self, channel: Channel, offer: wire.Offer, theirs: Geometry, remote: RemoteMemory, heartbeat_s: float) -> None:
        self.engine_id = offer.engine_id
        self.epoch: Epoch = wire.parse_epoch(offer.epoch, channel.peer)
        self.theirs = theirs
        self.bytes = 0
        self._key = offer.lease_key
        self._channel = channel
        self._remote = remote
        self._heartbeat_s = heartbeat_s
        self._stopping = threading.Event()  # no read begins any more
        self._uses = Uses()
        self._begun: dict[Load, Reading] = {}  # each a use until its ``read``
        self._thread = threading.Thread(target=self._listen, name=f"torpor-kv-link {channel.peer}", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return self._channel.peer

    @property
    def alive(self) -> bool:
        return not self._stopping.is_set()

    def ready(self, load: Load) -> bool:
        """Whether the owner's worker has heard of the hand-off: its blocks are written before. False: look again soon. Whether
        the hand-off is this load's is said after the read. StaleEpochError, PeerError, TransportError."""
        with self._uses.reading():
            self._check_alive()
            verdict = heard(self._remote.look(load.lease)[0], self.epoch, load.lease)
        if verdict is Verdict.NOT_YET:
            return False
        self._check(verdict, load)
        return True

    def begin(self, load: Load, timeout_s: float) -> bool:
        """``ready`` and the first part of ``read``, for the engine's thread: it waits for nothing. True: ``read`` of that load
        must follow, on any thread, whatever becomes of the load; its ``timeout_s`` begins then. False: nothing was begun, and
        ``ready`` and ``read`` say why, if anything is wrong. Other reads may be under way."""
        if not (self._remote.begins and self._uses.begin()):
            return False
        try:
            if (
                self.alive
                and len(load.remote) == len(load.local)
                and heard(self._remote.look(load.lease)[0], self.epoch, load.lease) is Verdict.VALID
            ):
                self._begun[load] = self._remote.begin(self._request(load, timeout_s))
        except Exception as error:  # whatever it is, the puller's own attempt meets it too, and ends the load
            logger.debug("the read of request %s is not begun at once: %s", load.request_id, error)
        finally:
            if load not in self._begun:
                self._uses.end()
        return load in self._begun

    def read(self, load: Load, ours: Geometry, timeout_s: float) -> None:
        """Fetches the blocks of a load that is ``ready``, or has begun, and proves them right (P3). PeerError, StaleEpochError,
        TransportError, LoadCancelled."""
        with contextlib.ExitStack() as held:
            begun = self._begun.pop(load, None)
            if begun is not None:
                held.callback(self._uses.end)
                moved = begun.finish(time.monotonic() + timeout_s)
            else:
                load.check_against(ours, self.theirs, str(self))
                held.enter_context(self._uses.reading())
                self._check_alive()
                moved = self._remote.read(self._request(load, timeout_s), lambda: self._confirm(load))
            self._confirm(load)
        self.bytes += moved

    def give_up(self, load: Load) -> None:
        """What has begun of an unwanted load has ended when this returns, unless somebody else ends it: ``read`` of it is then
        told so, and touches nothing. Any thread."""
        begun = self._begun.pop(load, None)
        if begun is None:
            return
        try:
            begun.finish(time.monotonic())
        except Exception as error:  # that it was stopped, most of the time; its bytes are nobody's
            logger.debug("the read of request %s is given up: %s", load.request_id, error)
        finally:
            self._uses.end()

    def _request(self, load: Load, timeout_s: float) -> BlockRead:
        return BlockRead(
            local=load.local,
            remote=load.remote,
            writing=load.writing,
            stop=lambda: self._stopping.is_set() or load.unwanted,
            deadline=time.monotonic() + timeout_s,
            notice=lambda: wire.read_notice(load.lease, load.expected_word(self._key)),
            meanwhile=lambda: load.expected_word(self._key),
        )

    def tell_done(self, load: Load) -> None:
        """The owner may let go. Told of a lease that it does not know yet, it would keep the blocks until the lease expires: so
        only of one that was ``ready``."""
        word = load.expected_word(self._key)
        with contextlib.suppress(PeerError):
            self._channel.send(wire.ReadDone(lease=load.lease, commitment=word.to_bytes(8, "big")))

    def stop(self) -> None:
        """No read begins any more, and one that runs ends soon."""
        self._stopping.set()

    def close(self, timeout_s: float) -> bool:
        """Stops reads, drops the import, says goodbye. False when a read did not stop in time: the import is dropped when it
        does. Idempotent."""
        self.stop()
        with self._uses.alone(timeout_s) as alone:
            dropped = alone and self._dropped()
        if not alone:
            self._channel.abort()
            return False
        if dropped:
            with contextlib.suppress(PeerError):
                self._channel.send(wire.Goodbye())
        self._channel.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        return dropped

    def _check_alive(self) -> None:
        if self._stopping.is_set():
            raise PeerError(f"{self} has withdrawn its KV cache or is gone", peer=str(self))

    def _confirm(self, load: Load) -> None:
        """What was read before this call is right: the owner lives, and still had that epoch mapped and that lease open, for this
        load."""
        expected = load.expected_word(self._key)  # before the look: the look is what counts, and is the later the better
        self._check(judge(*self._remote.look(load.lease), self.epoch, load.lease, expected), load)
        if self._channel.hung_up():  # a killed owner cleared no words
            raise PeerError(f"{self} is gone", peer=str(self))

    def _check(self, verdict: Verdict, load: Load) -> None:
        if verdict is Verdict.VALID:
            return
        if verdict in (Verdict.RELEASED, Verdict.OTHER_EPOCH):
            raise StaleEpochError(
                f"{self} has released the memory that was read (epoch {self.epoch}: {verdict.value})",
                peer=str(self),
                expected=str(self.epoch),
                found=verdict.value,
            )
        raise PeerError(
            f"{self} does not lease these blocks for request {load.params.remote_request_id}: {verdict.value}", peer=str(self)
        )

    def _listen(self) -> None:
        try:
            while True:
                received = self._channel.receive(self._heartbeat_s)
                if received is None:
                    self._channel.send(wire.Ping())
                    continue
                message = received[0]
                if isinstance(message, wire.Withdraw) and message.epoch == str(self.epoch):
                    self._let_go()
                    return
                raise PeerError(f"{self} sent {type(message).__name__} where none is due", peer=str(self))
        except PeerError as error:
            if self.alive:
                logger.info("the connection to %s has ended: %s", self, error)
        finally:
            self._stopping.set()
            self._drop()
            self._channel.close()

    def _drop(self) -> None:
        """The connection ends after the import: while it lives, the owner waits and does not have to guess."""
        for nap_s in (*DROP_NAPS_S, None):
            with self._uses.alone():
                if self._dropped() or nap_s is None:
                    return
            time.sleep(nap_s)

    def _dropped(self) -> bool:
        """By whoever is alone with it. A transport's surprise means that it may be left, not that nobody hears of it."""
        try:
            return self._remote.close()
        except Exception:
            logger.exception("dropping what we have of the memory of %s", self)
            return False

    def _let_go(self) -> None:
        """The answer to a withdrawal: sent when nothing is in flight and nothing is held any more, or not at all."""
        self._stopping.set()
        with self._uses.alone():
            dropped = self._dropped()
        if dropped:
            self._channel.send(wire.Withdrawn(epoch=str(self.epoch)))
        else:
            logger.warning("a read from %s is still in flight, or its memory cannot be let go: no acknowledgement", self)


def connect(
    target: Target,
    engine_id: str,
    ours: Geometry,
    transport: Transport,
    secret: bytes | None,
    options: Options,
    heartbeat_s: float,
) -> Link:
    """Finds the peer, proves, asks, imports. PeerError, HandshakeError, AsleepError, TransportError."""
    who = f"engine {target.engine_id!r}"
    channel = Channel(transport.dial(target, options.connect_timeout_s), who, io_timeout_s=options.handshake_timeout_s)
    descriptors: list[int] = []
    try:
        deadline = time.monotonic() + options.handshake_timeout_s
        greet(channel, secret, transport.name, deadline)
        channel.send(
            wire.ImportRequest(
                engine_id=engine_id, remote_engine_id=target.engine_id, spec=ours.wire_spec(), heartbeat_s=heartbeat_s
            )
        )
        offer, _ = expect(channel, wire.Offer, deadline)
        if offer.engine_id != target.engine_id:
            raise HandshakeError(f"{who} says it is {offer.engine_id!r}", peer=who)
        wire.check_compatible(ours.spec, offer.spec, who)
        theirs = of_offer(offer, who)
        _receive_descriptors(channel, offer.descriptors, descriptors, deadline)
        remote = transport.attach(offer, theirs, descriptors, who)
    except BaseException:
        channel.close()
        raise
    finally:
        close_descriptors(descriptors)
    return _keep(channel, offer, theirs, remote, heartbeat_s)


def _keep(channel: Channel, offer: wire.Offer, theirs: Geometry, remote: RemoteMemory, heartbeat_s: float) -> Link:
    try:
        return Link(channel, offer, theirs, remote, heartbeat_s)
    except BaseException:
        remote.close()
        channel.close()
        raise


def _receive_descriptors(channel: Channel, wanted: int, into: list[int], deadline: float) -> None:
    if wanted and not channel.is_local:
        raise HandshakeError(f"{channel.peer} offers descriptors over a network", peer=channel.peer)
    make_room(wanted)
    into.extend(channel.take_descriptors())
    while len(into) < wanted:
        message, _ = expect(channel, wire.Descriptors, deadline)
        part = channel.take_descriptors()
        into.extend(part)
        if len(part) != message.count:
            raise HandshakeError(f"{channel.peer} announced {message.count} descriptors and sent {len(part)}", peer=channel.peer)
    if len(into) != wanted:
        raise HandshakeError(f"{channel.peer} offered {wanted} descriptors and sent {len(into)}", peer=channel.peer)
