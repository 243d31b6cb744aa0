"""Promises of reports, and how their errors read."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from torpor.errors import BugError, SleepAborted, TorporError

Report: TypeAlias = dict[str, Any]
Ticket: TypeAlias = "Future[Report]"
"""The promise of a report. Completed on the engine's loop thread."""


def complete(tickets: Sequence[Ticket], report: Report) -> None:
    for ticket in tickets:
        ticket.set_result(report)


def fail(tickets: Sequence[Ticket], error: TorporError) -> None:
    for ticket in tickets:
        ticket.set_exception(error)


def told(error: BaseException, state: str) -> TorporError:
    """The error as one of ours, with the state the engine is in because of it."""
    if not isinstance(error, TorporError):
        wrapped = BugError(f"{type(error).__name__} in a memory transaction: {error}", original=type(error).__name__)
        wrapped.__cause__ = error
        error = wrapped
    error.fields.setdefault("state", state)
    return error


def stopped(error: BaseException, state: str) -> SleepAborted:
    """A hook has stopped a sleep before anything was unmapped."""
    peer = error.__cause__.fields.get("peer", "") if isinstance(error.__cause__, TorporError) else ""
    hook = error.fields.get("hook", "?") if isinstance(error, TorporError) else "?"
    message = f"sleep stopped, nothing was unmapped: {error}"
    aborted = SleepAborted(message, reason="hook", hook=hook, waiting_for=peer, state=state)
    aborted.__cause__ = error
    return aborted


def names(request_ids: Sequence[str], limit: int = 8) -> str:
    more = len(request_ids) - limit
    return ", ".join(request_ids[:limit]) + (f" and {more} more" if more > 0 else "")
