"""One thread per peer that we read from: it connects when there is something to read, and ends one read after the other, so a
slow or dead peer holds up its own loads only. Where a device copies, the next read begins before the one before it has ended.

A client can be here before the owner's worker has the hand-off. Such a load is put aside and looked at now and then, while others
are read; one whose hand-off never comes - a forged one - costs them nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from torpor.connectors.link import Link
from torpor.connectors.loads import Load, LoadState
from torpor.connectors.transport import Target
from torpor.connectors.turns import Turn, Turns
from torpor.errors import PeerError, StaleEpochError, TorporError, TransportError

logger = logging.getLogger(__name__)

JOIN_S = 5.0
GRACE_S = 0.5  # how long a hand-off may take from the owner's scheduler to its worker after the client has it


class Puller:
    """``connect`` makes a link or raises. ``read`` moves one load over a link. ``ended`` is called once for every load but those
    that only tell, from this thread or from whoever ended it. ``begin`` waits for nothing; true: it began what ``read`` ends."""

    def __init__(
        self,
        target: Target,
        connect: Callable[[Target], Link],
        read: Callable[[Link, Load], None],
        ended: Callable[[Load], None],
        begin: Callable[[Link, Load], bool] = lambda link, load: False,
    ) -> None:
        self.target = target
        self.idle_since = time.monotonic()
        self._connect = connect
        self._read = read
        self._ended = ended
        self._begin = begin
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()  # wakes a thread in two thirds of the time that a Condition takes
        self._waiting = False  # for the bell
        self._turns = Turns(self._begin_at_once)
        self._link: Link | None = None
        self._undropped: list[Link] = []  # closed, but their import could not be dropped
        self._admits = True  # false while our own KV cache is released: no link may come up
        self._stops = 0  # a link that was asked for before the last one is of no use: it was examined for weights of then
        self._spoilt = False  # this thread found the link to be of no use, and drops it when no read over it is on its way
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"torpor-kv-pull {target.engine_id}", daemon=True)
        self._thread.start()

    @property
    def link(self) -> Link | None:
        link = self._link
        return link if link is not None and link.alive else None

    @property
    def busy(self) -> bool:
        with self._lock:
            return self._turns.busy

    def submit(self, load: Load) -> None:
        with self._lock:
            refused = self._closed or not self._admits
            if not refused:
                self._turns.add(load)
                self._ring()
        if refused:
            self._end(load, LoadState.FAILED, "this engine releases its KV cache")

    def _begin_at_once(self, load: Load) -> Link | None:
        """With the lock, on the engine's thread or this puller's."""
        link = self.link
        if link is None or link.epoch != load.epoch or load.only_tells or not load.start() or not self._begin(link, load):
            return None
        return link

    def prepare(self) -> None:
        """For the engine's thread, which has to look in now and then anyhow: work that the loads under way will need."""
        self._turns.prepare()

    def cancel(self, request_id: str) -> None:
        """Ends the load of that request, if there is one. Blocks while a write of it is under way, which is milliseconds: it does
        not wait for the loads before it."""
        self._give_up(lambda load: load.request_id == request_id and not load.only_tells, "cancelled")

    def stop(self) -> None:
        """Ends all loads: nothing writes for them any more. No link comes up until ``admit``."""
        with self._lock:
            self._admits = False
            self._stops += 1
            link = self._link
        if link is not None:
            link.stop()
        self._give_up(lambda load: True, "this engine releases its KV cache")
        with self._lock:
            self._turns.take_waiting()

    def release(self, timeout_s: float) -> bool:
        """``stop``, and the import is dropped. False when a read did not end in time, or the driver refused."""
        self.stop()
        return self._drop_link(timeout_s)

    def admit(self) -> None:
        with self._lock:
            self._admits = True

    def close(self, timeout_s: float) -> None:
        """Idempotent."""
        self.release(timeout_s)
        with self._lock:
            self._closed = True
            self._ring()
        self._thread.join(max(timeout_s, JOIN_S))

    def _give_up(self, which: Callable[[Load], bool], reason: str) -> None:
        """Any thread. What has begun is waited for here: its turn comes when all reads before it have ended."""
        with self._lock:
            turns = [turn for turn in self._turns.pending() if which(turn.load)]
            for turn in turns:
                turn.load.unwant()  # with the lock: what has not begun does not begin any more
        for turn in turns:
            if turn.begun is not None:
                turn.begun.give_up(turn.load)
            self._end(turn.load, LoadState.FAILED, reason)

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            done = self._work_on(turn.load, turn.begun, last=time.monotonic() - turn.first >= GRACE_S)
            with self._lock:
                self.idle_since = time.monotonic()
                self._turns.over(again=not done and self._admits)
                drops = self._spoilt and not self._turns.on_their_way
            if drops:
                self._drop_link()
            del turn  # a prompt of 32768 tokens takes 0.3 ms to free: not when the next load comes

    def _next(self) -> Turn | None:
        """Waits for the next turn. None: closed."""
        while True:
            with self._lock:
                if (turn := self._turns.next()) is not None:
                    return turn
                if self._closed:
                    return None
                next_in_s = self._turns.next_in_s()
                self._waiting = True
            with contextlib.suppress(Empty):
                self._bell.get(timeout=next_in_s)

    def _ring(self) -> None:
        """With the lock. Once for every wait: what comes while the thread works is seen without."""
        if self._waiting:
            self._waiting = False
            self._bell.put(None)

    def _work_on(self, load: Load, begun: Link | None, last: bool) -> bool:
        """False: its hand-off has not come yet. ``last``: then it will not come any more. Raises nothing: whatever goes wrong
        with one load, the thread serves the others, and ends the reads that are on their way."""
        try:
            if begun is None and not load.start():
                return self._tell_ended(load) or last
            link = begun or self._link_for(load)
            try:
                if begun is None and not link.ready(load):
                    if last:
                        raise PeerError(f"{link} has handed off nothing under lease {load.lease}", peer=self.target.engine_id)
                    return False
                self._read_over(link, load)
            except (StaleEpochError, TransportError):
                # The import is of no use any more, or the way to the peer is broken: the next load gets a new one.
                self._spoil(link)
                raise
        except TorporError as error:
            self._end(load, LoadState.FAILED, f"{type(error).__name__}: {error}")
        except Exception as error:  # a transport's surprise
            logger.exception("reading the KV of request %s", load.request_id)
            self._spoil(self._link)
            self._end(load, LoadState.FAILED, f"{type(error).__name__}: {error}")
        return True

    def _spoil(self, link: Link | None) -> None:
        """No read begins over it any more."""
        self._spoilt = True
        if link is not None:
            link.stop()

    def _read_over(self, link: Link, load: Load) -> None:
        try:
            if not load.only_tells:
                self._read(link, load)
                self._end(load, LoadState.DONE, "")
        finally:
            link.tell_done(load)

    def _tell_ended(self, load: Load) -> bool:
        """It was cancelled while it waited: the owner need not keep its blocks. False: the owner does not know of them yet."""
        link = self.link
        if link is None or link.epoch != load.epoch:
            return True
        try:
            if not link.ready(load):
                return False
        except TorporError:
            return True
        link.tell_done(load)
        return True

    def _link_for(self, load: Load) -> Link:
        """The link of the load's epoch. Only equality means anything (P1): with any other epoch there is one new handshake, and
        if the owner's present epoch still is not the load's, the load is lost."""
        link = self.link
        if link is None or link.epoch != load.epoch:
            self._drop_link()
            link = self._new_link()
        if link.epoch != load.epoch:
            raise StaleEpochError(
                f"{link} has epoch {link.epoch} now, the hand-off is of {load.epoch}",
                peer=self.target.engine_id,
                expected=str(load.epoch),
                found=str(link.epoch),
            )
        return link

    def _new_link(self) -> Link:
        asked = self._stops
        try:
            link = self._connect(self.target)
        except TorporError as error:
            if asked == self._stops:  # whoever waits behind would only wait for the same answer
                self._fail_queued(f"{type(error).__name__}: {error}")
            raise
        with self._lock:
            if asked == self._stops and self._admits and not self._closed:
                self._link = link
                return link
            self._undropped.append(link)
        self._drop_link()
        raise PeerError("this engine has released its KV cache meanwhile", peer=self.target.engine_id)

    def _fail_queued(self, reason: str) -> None:
        with self._lock:
            waiting = self._turns.take_waiting()
        for load in waiting:
            self._end(load, LoadState.FAILED, reason)

    def _drop_link(self, timeout_s: float = JOIN_S) -> bool:
        """False when an import is left; it is tried again by the next call."""
        with self._lock:
            links = [*self._undropped, *([self._link] if self._link is not None else [])]
            self._link, self._undropped, self._spoilt = None, [], False
        left = [link for link in links if not link.close(timeout_s)]
        with self._lock:
            self._undropped += left
        return not left

    def _end(self, load: Load, state: LoadState, reason: str) -> None:
        if not load.end(state) or load.only_tells:
            return
        if state is LoadState.FAILED:
            logger.warning(
                "the KV of request %s does not come from engine %s: %s", load.request_id, self.target.engine_id, reason
            )
        try:
            self._ended(load)
        except Exception:  # it is theirs who wanted to hear of it: a loop that is closed already
            logger.exception("telling of the end of request %s", load.request_id)
