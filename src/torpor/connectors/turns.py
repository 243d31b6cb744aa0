"""The loads of one peer: whose turn it is, whose reads are on their way, who waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from torpor.connectors.link import Link
from torpor.connectors.loads import Load

GRACE_LOOK_S = 0.005
ON_THEIR_WAY = 4
"""Reads begun and not ended: the device copies for the next while the bytes of one are checked and told of, and while the
engine's thread, which asks for several in one step, has the interpreter to itself. A withdrawal waits for all of them."""


class Turn(msgspec.Struct, frozen=True):
    """A load whose turn it is, or will be."""

    load: Load
    at: float
    first: float  # when its hand-off was looked for first
    begun: Link | None = None  # over which its read is under way


class Turns:
    """Whoever calls holds the puller's lock, but for ``prepare``."""

    def __init__(self, begin: Callable[[Load], Link | None]) -> None:
        """``begin``: begins the read of a load without waiting, over the link that it returns; None: it cannot be now."""
        self._begin = begin
        self._running: Turn | None = None
        self._begun: tuple[Turn, ...] = ()  # the next ones, in this order
        self._queue: deque[Load] = deque()
        self._aside: list[Turn] = []  # their hand-offs have not come yet

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._aside or self._begun) or self._running is not None

    @property
    def on_their_way(self) -> bool:
        """Whether reads that have begun wait for their turns."""
        return bool(self._begun)

    def pending(self) -> list[Turn]:
        turns = ([self._running] if self._running is not None else []) + [*self._begun]
        return [*turns, *map(_turn_of, self._queue), *self._aside]

    def prepare(self) -> None:
        """Any thread, without the lock: work that the reads on their way will need."""
        running = self._running
        for turn in (*((running,) if running is not None else ()), *self._begun):
            turn.load.prepare()

    def add(self, load: Load) -> None:
        """It begins at once where it may: the device copies while the puller's thread wakes, for which it may have to wait until
        the engine's lets go of the interpreter."""
        self._queue.append(load)
        self._begin_queued()

    def next(self) -> Turn | None:
        """Whose turn it is, until ``over``; None: nobody's yet."""
        self._begin_queued()
        if self._begun:
            self._running, *rest = self._begun
            self._begun = tuple(rest)
            self._begin_queued()
        elif (turn := self._first()) is not None:
            self._take(turn)
            self._running = turn
        return self._running

    def over(self, again: bool) -> None:
        """``again``: its hand-off has not come yet."""
        turn, self._running = self._running, None
        if again and turn is not None:
            self._aside.append(Turn(turn.load, time.monotonic() + GRACE_LOOK_S, turn.first))

    def next_in_s(self) -> float | None:
        """Seconds until a load that was put aside has its turn; None: there is none."""
        soonest = self._soonest()
        return None if soonest is None else max(0.0, soonest.at - time.monotonic())

    def take_waiting(self) -> list[Load]:
        """Those of which nothing is on its way; they are forgotten."""
        waiting = [*self._queue, *(turn.load for turn in self._aside)]
        self._queue.clear()
        self._aside.clear()
        return waiting

    def _soonest(self) -> Turn | None:
        return min(self._aside, key=lambda turn: turn.at, default=None)

    def _first(self) -> Turn | None:
        """Of those of which nothing is on its way. Who was put aside comes when it is time, however many are behind."""
        soonest = self._soonest()
        if soonest is not None and soonest.at <= time.monotonic():
            return soonest
        return _turn_of(self._queue[0]) if self._queue else None

    def _take(self, turn: Turn) -> None:
        """What ``_first`` has found."""
        if self._queue and turn.load is self._queue[0]:
            self._queue.popleft()
        else:
            self._aside.remove(turn)

    def _begin_queued(self) -> None:
        """In their order, and only beside reads that have begun as well: others may still have to find their link. So when the
        first one cannot begin, none does until those on their way have ended and it has had its turn."""
        while self._running is None or self._running.begun is not None:
            if len(self._begun) + (self._running is not None) >= ON_THEIR_WAY:
                return
            if (turn := self._first()) is None or (link := self._begin(turn.load)) is None:
                return
            self._take(turn)
            self._begun = (*self._begun, Turn(turn.load, turn.at, turn.first, link))


def _turn_of(load: Load) -> Turn:
    now = time.monotonic()
    return Turn(load, now, now)
