"""The engines behind the router: what each was last seen to be, how busy it is, and which to ask next."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torpor.router.config import Policy, RouterConfig

Clock = Callable[[], float]
MAX_DOUBLINGS = 32  # more than any max_backoff_s needs; a float ends at 1023


class BackendState(enum.Enum):
    UNKNOWN = "unknown"  # not asked yet
    READY = "ready"  # the last probe or answer said that it serves
    NOT_READY = "not_ready"  # it answers, but not requests: asleep, loading, paused
    DOWN = "down"  # it does not answer; left alone until ``retry_at``


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    url: str
    role: str
    state: str
    detail: str  # the engine's own word for its state, or the last failure
    in_flight: int
    requests: int
    failures: int
    failures_in_a_row: int


class Backend:
    """One engine. ``saw_*`` are the only moves between states; each may follow any other, since what is seen is the truth."""

    def __init__(self, url: str, role: str, config: RouterConfig, clock: Clock = time.monotonic) -> None:
        self.url = url.rstrip("/")
        self.role = role
        self._config = config
        self._clock = clock
        self._state = BackendState.UNKNOWN
        self._detail = ""
        self._retry_at = 0.0
        self._failures_in_a_row = 0
        self._in_flight = self._requests = self._failures = 0
        self._silent_since: float | None = None
        self._lost: asyncio.Future[str] | None = None
        self._given_up = False

    @property
    def state(self) -> BackendState:
        return self._state

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def resting(self) -> bool:
        """It failed, and its backoff has not passed: asked only when nobody else is left."""
        return self._clock() < self._retry_at

    @property
    def lost(self) -> asyncio.Future[str]:
        """Why whoever waits for it waits in vain; done once its probes have failed for ``silence_timeout_s``, or by
        ``give_up``. A new one when it is back."""
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        return self._lost

    def saw_ready(self) -> None:
        """A probe said so. The backoff of a failed request still runs: a probe is easier to answer than a request."""
        self._heard()
        self._move(BackendState.READY, "")

    def saw_answer(self) -> None:
        """A request was served."""
        self._heard()
        self._failures_in_a_row = 0
        self._retry_at = 0.0
        self._move(BackendState.READY, "")

    def saw_not_ready(self, detail: str) -> None:
        self._heard()
        self._move(BackendState.NOT_READY, detail)

    def saw_silence(self, detail: str) -> None:
        """A probe failed."""
        now = self._clock()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= self._config.silence_timeout_s:
            self._lose("it has been silent for too long (silence_timeout_s)")
        self._move(BackendState.DOWN, detail)

    def give_up(self, why: str) -> None:
        """Ends what waits for it, and whatever will: the router stops."""
        self._given_up = True
        self._lose(why)

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    def saw_failure(self, detail: str) -> None:
        """A request failed: connection, timeout, or a 5xx that is not about sleeping."""
        self._failures += 1
        self._failures_in_a_row += 1
        doublings = min(self._failures_in_a_row - 1, MAX_DOUBLINGS)
        pause = min(self._config.max_backoff_s, self._config.backoff_s * 2**doublings)
        self._retry_at = self._clock() + pause
        self._move(BackendState.DOWN, detail)

    def _heard(self) -> None:
        self._silent_since = None
        if self._lost is not None and self._lost.done() and not self._given_up:
            self._lost = None

    def _move(self, state: BackendState, detail: str) -> None:
        self._state, self._detail = state, detail

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._in_flight += 1
        self._requests += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def stats(self) -> BackendStats:
        return BackendStats(
            url=self.url,
            role=self.role,
            state=self._state.value,
            detail=self._detail,
            in_flight=self._in_flight,
            requests=self._requests,
            failures=self._failures,
            failures_in_a_row=self._failures_in_a_row,
        )


class Group:
    """Engines of one role."""

    def __init__(self, backends: Sequence[Backend], policy: Policy) -> None:
        self.backends = tuple(backends)
        self._policy = policy
        self._turn = 0

    def usable(self) -> list[Backend]:
        """Those believed to serve, best first. Empty: do without this role."""
        return [b for b in self._ordered() if b.state in (BackendState.READY, BackendState.UNKNOWN) and not b.resting]

    def candidates(self) -> list[Backend]:
        """All, best first: one that sleeps may wake for a request, and one that was down may be back."""
        usable = self.usable()
        others = [b for b in self._ordered() if b not in usable]
        return usable + sorted(others, key=lambda b: (b.resting, b.state is BackendState.DOWN))

    @property
    def any_ready(self) -> bool:
        return any(b.state is BackendState.READY for b in self.backends)

    def _ordered(self) -> list[Backend]:
        """Round robin, or least loaded with turns among equals."""
        turn = self._turn % max(1, len(self.backends))
        turned = [*self.backends[turn:], *self.backends[:turn]]
        return turned if self._policy == "round_robin" else sorted(turned, key=lambda b: b.in_flight)

    def take_turn(self) -> None:
        """One request was placed: the next begins with the next engine."""
        self._turn += 1
