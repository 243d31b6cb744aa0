"""The thread that moves blocks between a KV cache and a store, one request at a time, off the step loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from torpor.connectors.base import Finished
from torpor.connectors.store import Fetch, Save, Store
from torpor.errors import TorporError

logger = logging.getLogger(__name__)

JOIN_S = 5.0


class Mover:
    """Loads go before saves: a request waits for them. Methods may be called from any thread; only ``wait_idle`` and ``close``
    block."""

    def __init__(self, store: Store, settle: Callable[[], None], tell: Callable[[], None]) -> None:
        """``settle`` blocks until the device has done what it was asked to: what is saved is written then, and no step that was
        only begun uses the blocks that a load fills. ``tell`` is called when a load has ended."""
        self._store = store
        self._settle = settle
        self._tell = tell
        self._changed = threading.Condition()
        self._loads: deque[Fetch] = deque()
        self._saves: deque[Save] = deque()
        self._running: Fetch | Save | None = None
        self._unwanted = False  # nobody waits for the load that runs
        self._closed = False
        self._sent: set[str] = set()
        self._arrived: set[str] = set()
        self._lost: set[str] = set()
        self.loads_done = self.loads_failed = self.bytes_loaded = 0
        self._thread = threading.Thread(target=self._run, name=f"torpor-kv-{store.name}", daemon=True)
        self._thread.start()

    @property
    def loads_in_flight(self) -> int:
        with self._changed:
            return len(self._loads) + isinstance(self._running, Fetch)

    @property
    def saves_in_flight(self) -> int:
        with self._changed:
            return len(self._saves) + isinstance(self._running, Save)

    def save(self, order: Save) -> None:
        with self._changed:
            self._saves.append(order)
            self._changed.notify_all()

    def drop_save(self, order: Save) -> None:
        """Its blocks are not what they were: they are only given back."""
        with self._changed:
            self._sent.add(order.request_id)

    def load(self, fetch: Fetch) -> None:
        with self._changed:
            self._loads.append(fetch)
            self._changed.notify_all()

    def drop_load(self, request_id: str, why: str) -> None:
        logger.warning("the KV of request %s is not loaded: %s", request_id, why)
        with self._changed:
            self._lost.add(request_id)
            self.loads_failed += 1

    def cancel(self, request_id: str) -> None:
        """Ends that load, if there is one: at once in the queue, else with the piece under way."""
        with self._changed:
            waiting = [fetch for fetch in self._loads if fetch.request_id == request_id]
            for fetch in waiting:
                self._loads.remove(fetch)
            running = isinstance(self._running, Fetch) and self._running.request_id == request_id
            self._unwanted |= running
        for fetch in waiting:
            self.drop_load(fetch.request_id, "cancelled")

    def cancel_loads(self) -> None:
        with self._changed:
            names = [fetch.request_id for fetch in self._loads]
            if isinstance(self._running, Fetch):
                names.append(self._running.request_id)
        for name in names:
            self.cancel(name)

    def wait_idle(self, deadline: float) -> bool:
        """True when nothing reads or writes the KV cache any more; ``deadline`` is of ``time.monotonic()``."""
        with self._changed:
            while self._loads or self._saves or self._running is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._closed:
                    return False
                self._changed.wait(remaining)
            return True

    def take_finished(self, *, arrived_is_lost: bool = False) -> Finished:
        with self._changed:
            if arrived_is_lost:
                self._lost |= self._arrived
                self._arrived = set()
                return Finished()
            finished = Finished(sending=frozenset(self._sent), recving=frozenset(self._arrived), failed=frozenset(self._lost))
            self._sent, self._arrived, self._lost = set(), set(), set()
        return finished

    def close(self) -> None:
        """What is queued is dropped, what runs ends. Idempotent."""
        with self._changed:
            self._closed = True
            self._unwanted = True
            self._changed.notify_all()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._loads or self._saves or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                self._running = task = self._loads.popleft() if self._loads else self._saves.popleft()
                self._unwanted = False
            try:
                if isinstance(task, Fetch):
                    self._fetch(task)
                    self._tell()
                else:
                    self._keep(task)
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()

    def _fetch(self, fetch: Fetch) -> None:
        try:
            self._settle()
            moved = self._store.load(fetch, lambda: self._unwanted)
            self._settle()
        except Exception as error:  # a store's surprise costs one load, not the thread that serves all others
            _log(error, f"loading the KV of request {fetch.request_id}")
            self.drop_load(fetch.request_id, f"{type(error).__name__}: {error}")
            return
        with self._changed:
            if self._unwanted:
                self._lost.add(fetch.request_id)
                self.loads_failed += 1
            else:
                self._arrived.add(fetch.request_id)
                self.loads_done += 1
                self.bytes_loaded += moved

    def _keep(self, order: Save) -> None:
        try:
            self._settle()
            if not self._closed:  # else the store may be gone: whoever closed waited as long as it could
                self._store.save(order)
        except Exception as error:
            _log(error, f"keeping the KV of request {order.request_id}")
            logger.warning("the KV of request %s is not kept: %s", order.request_id, error)
        with self._changed:
            self._sent.add(order.request_id)


def _log(error: Exception, what: str) -> None:
    if not isinstance(error, TorporError):
        logger.exception("%s", what, exc_info=error)
