"""What must be true of one engine, in a page: which pools are there, what a call does in each state, how a call may end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torpor.engine.base import EngineState
from torpor.engine.sleep_plan import LEVEL_POLICIES
from torpor.engine.tickets import Ticket
from torpor.memory import Content, Residency
from torpor.memory.types import MemoryStats

S = EngineState
TAGS = ("weights", "kv_cache", "runtime")
TURNS_AWAY = (S.SLEEPING, S.ASLEEP, S.WAKING)


@dataclass
class Pools:
    """Residency and content of every pool, as the finished calls left them."""

    resident: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(TAGS, True))
    content: dict[str, Content] = field(default_factory=lambda: dict.fromkeys(TAGS, Content.VALID))

    def cannot(self, policies: Mapping[str, str]) -> bool:
        """Content that is lost cannot be copied to the host."""
        return any(policy == "host" and self.content[tag] is Content.LOST for tag, policy in policies.items())

    def sleep(self, policies: Mapping[str, str]) -> bool:
        """Whether there was nothing to do (M9)."""
        before = dict(self.resident), dict(self.content)
        for tag, policy in policies.items():
            if policy != "keep":
                self.resident[tag] = False
                self.content[tag] = Content.ON_HOST if policy == "host" else Content.LOST
        return before == (self.resident, self.content)

    def wake(self, tags: Sequence[str] | None) -> list[str]:
        """The tags that had to be made again from their source."""
        for tag in TAGS if tags is None else tags:
            self.resident[tag] = True
        refilled = [t for t in ("weights", "runtime") if self.resident[t] and self.content[t] is Content.LOST]
        for tag in TAGS:
            if self.resident[tag]:
                self.content[tag] = Content.VALID
        return refilled

    def update(self) -> None:
        """What was left of the old weights is given up."""
        self.sleep({"weights": "discard"})

    @property
    def kv_is_gone(self) -> bool:
        return not self.resident["kv_cache"] and self.content["kv_cache"] is Content.LOST

    def missing(self) -> list[str]:
        return sorted(tag for tag in TAGS if not self.resident[tag] or self.content[tag] is not Content.VALID)

    def look(self, stats: MemoryStats) -> None:
        """Take over what is; after a driver's failure only the driver can say."""
        for tag in TAGS:
            self.resident[tag] = stats.tag(tag).residency is Residency.RESIDENT
            self.content[tag] = stats.tag(tag).content

    def check(self, stats: MemoryStats) -> None:
        for tag in TAGS:
            found = stats.tag(tag)
            assert found.content is self.content[tag], f"{tag} is {found.content}, not {self.content[tag]}"
            expected = Residency.RESIDENT if self.resident[tag] else Residency.ASLEEP
            assert found.residency is expected, f"{tag} is {found.residency}, not {expected}"
            assert (found.resident_bytes > 0) == self.resident[tag]


@dataclass
class Call:
    """One call of sleep, wake_up, pause, resume, release or update_weights, and what it asked for."""

    what: str
    ticket: Ticket
    asked_in: EngineState
    policies: Mapping[str, str] = field(default_factory=dict)
    mode: str = ""
    deadline_s: float = 60.0
    level: int | None = None
    tags: Sequence[str] | None = None
    version: int = 0  # of the weights; 0: of none that there are
    draining: Call | None = None  # what the engine drained for when it came
    requests: bool = False  # there were some when it came

    @property
    def sleeps(self) -> bool:
        return self.what in ("sleep", "pause", "release")

    @property
    def unmaps(self) -> bool:
        return any(policy != "keep" for policy in self.policies.values())

    def same_as(self, other: Call) -> bool:
        mine, theirs = ((c.what, c.level, c.mode, dict(c.policies), c.deadline_s) for c in (self, other))
        return mine == theirs

    @property
    def error(self) -> BaseException | None:
        return self.ticket.exception(0) if self.ticket.done() else None

    @property
    def report(self) -> dict[str, Any]:
        return self.ticket.result(0)


def policies_of(level: int, policies: Mapping[str, str] | None) -> dict[str, str]:
    """Of the pools that there are."""
    return dict(policies) if policies is not None else {t: p for t, p in LEVEL_POLICIES[level].items() if t in TAGS}


def state_after_sleep(state: EngineState, call: Call, draining_for: Call | None) -> tuple[EngineState, str]:
    """The state right after the call, and what becomes of it: "begins", "joins", "waits", "refused", "nothing to do", or
    that something was done: "done", or "resumed", whose report has a reason."""
    match state:
        case S.DRAINING:
            assert draining_for is not None
            return state, "joins" if call.same_as(draining_for) else "refused"
        case S.SLEEPING | S.WAKING:
            return state, "waits"
        case S.ASLEEP:
            if call.unmaps:
                return S.SLEEPING, "begins"
            return state, "done" if call.mode == "abort" and call.requests else "nothing to do"
        case S.PAUSED if not call.unmaps and call.mode != "abort":
            return state, "nothing to do"
        case _:
            return S.DRAINING, "begins"


def state_after_wake(state: EngineState) -> tuple[EngineState, str]:
    match state:
        case S.AWAKE:
            return state, "nothing to do"
        case S.PAUSED:
            return S.AWAKE, "resumed"
        case S.DRAINING:
            return S.AWAKE, "resumed"
        case S.SLEEPING | S.WAKING:
            return state, "waits"
        case _:
            return S.WAKING, "begins"


def state_after_update(state: EngineState, pools: Pools) -> tuple[EngineState, str]:
    match state:
        case S.SLEEPING | S.WAKING:
            return state, "waits"
        case S.ASLEEP if pools.kv_is_gone:
            return S.SLEEPING, "begins"
        case _:
            return state, "refused"


def state_after_resume(state: EngineState, draining_for: Call | None) -> tuple[EngineState, str]:
    match state:
        case S.AWAKE:
            return state, "nothing to do"
        case S.PAUSED:
            return S.AWAKE, "done"
        case S.DRAINING if draining_for is not None and not draining_for.unmaps:
            return S.AWAKE, "resumed"
        case _:
            return state, "refused"
