"""What an item of the suite ends with."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


class Failure(AssertionError):
    """The connector breaks what the item proves. The message says what was seen."""


class NotApplicable(Exception):
    """The item cannot say anything about this connector here. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    item: str
    proves: str  # the invariants, such as "P1"
    status: Status
    reason: str  # of a failure or of "not applicable"; of what passed, how much was looked at
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    connector: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Nothing failed, and something was shown."""
        statuses = {outcome.status for outcome in self.outcomes}
        return Status.FAILED not in statuses and Status.PASSED in statuses

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status is Status.FAILED)
