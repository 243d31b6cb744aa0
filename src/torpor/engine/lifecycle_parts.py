"""What the lifecycle is made of (the drain, the transaction, the calls that wait) and what it needs of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from torpor.engine.base import EngineState
from torpor.engine.sleep_plan import SleepPlan
from torpor.engine.tickets import Ticket


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


@dataclass(frozen=True, kw_only=True)
class Job:
    future: Future[Any]
    finish: Callable[[Future[Any]], None]
    tickets: Sequence[Ticket]


@dataclass(frozen=True)
class Queued:
    """A call that waits for a transaction to end."""

    start: Callable[[Ticket], None]
    ticket: Ticket
    sleeps: bool = False
