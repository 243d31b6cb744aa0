"""How a server stops: what is open may end by itself, then it is ended with an error, and only what hangs is cut."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("torpor.http")
ENDED_S = 1.0  # for requests that were ended to write their last event
LOOK_S = 0.05


class OpenRequests(Protocol):
    """What an application can do about the requests it is answering."""

    def frozen(self) -> str | None:
        """Why none of them can end by itself; None while they can."""
        ...

    def end(self) -> None:
        """Each gets an error as its last event, soon; so does one that comes later."""
        ...


class NobodysRequests:
    """Of an application that cannot end what it answers."""

    def frozen(self) -> str | None:
        return None

    def end(self) -> None:
        pass


class Drain:
    """The wait of one shutdown: until ``drain_s`` have passed, ``hurried`` is set, or there is nothing to wait for."""

    def __init__(self, requests: OpenRequests, drain_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._drain_s = drain_s
        self._clock = clock
        self.hurried = False

    def announce(self, count: int) -> None:
        """One line about ``count`` open requests; a warning, since some may be cut short."""
        requests = f"{count} request{'' if count == 1 else 's'}"
        frozen = self._requests.frozen()
        if not count:
            log.info("stopping")
        elif frozen is not None:
            log.warning("stopping: %s cannot go on, since %s: ended now", requests, frozen)
        else:
            log.warning("stopping: waiting up to %g s for %s; once more to end them", self._drain_s, requests)

    async def run(self, cut: Callable[[], None]) -> None:
        """Ends the requests when the wait is over, and calls ``cut`` for what is still open soon after. Cancel it when nothing
        is."""
        deadline = self._clock() + self._drain_s
        while not self.hurried and self._clock() < deadline and self._requests.frozen() is None:
            await asyncio.sleep(LOOK_S)
        self._requests.end()
        await asyncio.sleep(ENDED_S)
        log.warning("stopping: what has not ended %g s later is cut", ENDED_S)
        cut()


class CancellationsOfAShutdown(logging.Filter):
    """Drops uvicorn's tracebacks of what it has cancelled itself: it has said before how many there were."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return kind is None or not issubclass(kind, asyncio.CancelledError)


UNDRAMATIC = CancellationsOfAShutdown()
