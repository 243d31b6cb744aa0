"""One thread per peer that we read from: it connects when there is something to read, and reads one load after the other, so a
slow or dead peer holds up its own loads only."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from torpor.connectors.link import Link
from torpor.connectors.loads import Load, LoadState
from torpor.connectors.transport import Target
from torpor.errors import PeerError, StaleEpochError, TorporError, TransportError

logger = logging.getLogger(__name__)

JOIN_S = 5.0


class Puller:
    """``connect`` makes a link or raises. ``read`` moves one load over a link. ``ended`` is called once for every load but those
    that only tell, from this thread or from whoever ended it."""

    def __init__(
        self,
        target: Target,
        connect: Callable[[Target], Link],
        read: Callable[[Link, Load], None],
        ended: Callable[[Load], None],
    ) -> None:
        self.target = target
        self.idle_since = time.monotonic()
        self._connect = connect
        self._read = read
        self._ended = ended
        self._wake = threading.Condition()
        self._queue: deque[Load] = deque()
        self._running: Load | None = None
        self._link: Link | None = None
        self._undropped: list[Link] = []  # closed, but their import could not be dropped
        self._admits = True  # false while our own KV cache is released: no link may come up
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"torpor-kv-pull {target.engine_id}", daemon=True)
        self._thread.start()

    @property
    def link(self) -> Link | None:
        link = self._link
        return link if link is not None and link.alive else None

    @property
    def busy(self) -> bool:
        with self._wake:
            return bool(self._queue) or self._running is not None

    def submit(self, load: Load) -> None:
        with self._wake:
            refused = self._closed or not self._admits
            if not refused:
                self._queue.append(load)
                self._wake.notify_all()
        if refused:
            self._end(load, LoadState.FAILED, "this engine releases its KV cache")

    def cancel(self, request_id: str) -> None:
        """Ends the load of that request, if there is one. Blocks while a write of it is under way, which is milliseconds."""
        for load in self._pending():
            if load.request_id == request_id and not load.only_tells:
                self._end(load, LoadState.FAILED, "cancelled")

    def stop(self) -> None:
        """Ends all loads: nothing writes for them any more. No link comes up until ``admit``."""
        with self._wake:
            self._admits = False
            link = self._link
        if link is not None:
            link.stop()
        for load in self._pending():
            self._end(load, LoadState.FAILED, "this engine releases its KV cache")
        with self._wake:
            self._queue.clear()

    def release(self, timeout_s: float) -> bool:
        """``stop``, and the import is dropped. False when a read did not end in time, or the driver refused."""
        self.stop()
        return self._drop_link(timeout_s)

    def admit(self) -> None:
        with self._wake:
            self._admits = True

    def close(self, timeout_s: float) -> None:
        """Idempotent."""
        self.release(timeout_s)
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(max(timeout_s, JOIN_S))

    def _pending(self) -> list[Load]:
        with self._wake:
            return [*([self._running] if self._running is not None else []), *self._queue]

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                self._running = self._queue.popleft()
            try:
                if self._running.start():
                    self._work_on(self._running)
                else:
                    self._tell_cancelled(self._running)
            finally:
                with self._wake:
                    self._running = None
                    self.idle_since = time.monotonic()

    def _work_on(self, load: Load) -> None:
        try:
            link = self._link_for(load)
            try:
                self._read_over(link, load)
            except (StaleEpochError, TransportError):
                # The import is of no use any more, or the way to the peer is broken: the next load gets a new one.
                self._drop_link()
                raise
        except TorporError as error:
            self._end(load, LoadState.FAILED, f"{type(error).__name__}: {error}")
        except Exception as error:  # a transport's surprise ends one load, not the thread that serves all others
            logger.exception("reading the KV of request %s", load.request_id)
            self._drop_link()
            self._end(load, LoadState.FAILED, f"{type(error).__name__}: {error}")

    def _read_over(self, link: Link, load: Load) -> None:
        try:
            if not load.only_tells:
                self._read(link, load)
                self._end(load, LoadState.DONE, "")
        finally:
            link.tell_done(load)

    def _tell_cancelled(self, load: Load) -> None:
        """It ended in the queue: the owner need not keep its blocks."""
        link = self.link
        if link is not None and link.epoch == load.epoch:
            link.tell_done(load)

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
        try:
            link = self._connect(self.target)
        except TorporError as error:
            # Whoever waits behind would only wait for the same answer.
            self._fail_queued(f"{type(error).__name__}: {error}")
            raise
        with self._wake:
            if self._admits and not self._closed:
                self._link = link
                return link
            self._undropped.append(link)
        self._drop_link()
        raise PeerError("this engine releases its KV cache", peer=self.target.engine_id)

    def _fail_queued(self, reason: str) -> None:
        with self._wake:
            queued = list(self._queue)
            self._queue.clear()
        for load in queued:
            self._end(load, LoadState.FAILED, reason)

    def _drop_link(self, timeout_s: float = JOIN_S) -> bool:
        """False when an import is left; it is tried again by the next call."""
        with self._wake:
            links = [*self._undropped, *([self._link] if self._link is not None else [])]
            self._link, self._undropped = None, []
        left = [link for link in links if not link.close(timeout_s)]
        with self._wake:
            self._undropped += left
        return not left

    def _end(self, load: Load, state: LoadState, reason: str) -> None:
        if not load.end(state) or load.only_tells:
            return
        if state is LoadState.FAILED:
            logger.warning(
                "the KV of request %s does not come from engine %s: %s", load.request_id, self.target.engine_id, reason
            )
        self._ended(load)
