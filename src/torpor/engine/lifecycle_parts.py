"""What the lifecycle is made of (the drain, the transaction, the calls that wait) and what it needs of others."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from torpor.engine.base import EngineState
from torpor.engine.sleep_plan import SleepPlan
from torpor.engine.tickets import Ticket

log = logging.getLogger(__name__)

TELL_S = 10.0  # a transaction that takes longer says where it is, and again each time


class LifecycleScheduler(Protocol):
    """What a sleep needs of the scheduler."""

    def close_admission(self) -> None: ...
    def open_admission(self) -> None: ...
    def cancel_loads(self) -> list[str]: ...
    def freeze(self) -> None: ...
    def end_hand_offs(self) -> list[str]: ...
    def running_ids(self) -> list[str]: ...
    def loading_ids(self) -> list[str]: ...

    @property
    def has_running(self) -> bool: ...

    @property
    def has_loading(self) -> bool: ...


class Background(Protocol):
    """Runs one callable at a time away from the loop thread."""

    def submit(self, fn: Callable[[], Any], /) -> Future[Any]: ...


@dataclass(kw_only=True)
class Drain:
    plan: SleepPlan
    origin: EngineState
    started: float
    tickets: list[Ticket] = field(default_factory=list)
    ended_requests: bool = False  # by mode abort


class Work:
    """A transaction's work, which another thread may ask where it is."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._thread: int | None = None

    def __call__(self) -> Any:
        self._thread = threading.get_ident()
        try:
            return self._run()
        finally:
            self._thread = None

    def where(self) -> str:
        """The functions it is in, outermost first. What is beyond the last of them is the driver's or a hook's own."""
        frame = sys._current_frames().get(self._thread or 0)
        names = [f"{module.removeprefix('torpor.')}.{name}" for module, name in _functions(frame) if module.startswith("torpor.")]
        others = list(itertools.takewhile(lambda f: not f[0].startswith("torpor."), _functions(frame)))
        return " > ".join([*reversed(names), *(f"{module}.{name}" for module, name in reversed(others))]) or "no thread yet"


def _functions(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """(module, name), innermost first."""
    while frame is not None:
        yield frame.f_globals.get("__name__", "?"), frame.f_code.co_name
        frame = frame.f_back


@dataclass(kw_only=True)
class Job:
    name: str  # the state of the engine while it runs
    work: Work
    future: Future[Any]
    finish: Callable[[Future[Any]], None]
    tickets: Sequence[Ticket]
    started: float
    told: float  # when it last said where it is, or its start

    def tell(self, now: float) -> None:
        """Nobody can stop a driver's call that does not end, but somebody who waits can know which one it is."""
        if now - self.told >= TELL_S:
            self.told = now
            log.warning("%s for %.0f s, not ended yet: it is in %s", self.name, now - self.started, self.work.where())

    def wait(self, clock: Callable[[], float]) -> None:
        """Blocks until it has ended, and tells meanwhile."""
        while not wait([self.future], TELL_S).done:
            self.tell(clock())

    def tells_in(self, now: float) -> float:
        return max(0.0, self.told + TELL_S - now)


@dataclass(frozen=True)
class Queued:
    """A call that waits for a transaction to end."""

    start: Callable[[Ticket], None]
    ticket: Ticket
    sleeps: bool = False
