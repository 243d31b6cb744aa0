"""The sleep transaction: hooks let go, images are made and checked, memory is unmapped, images nobody needs are dropped.

Everything before the unmap is undone when it fails. The unmap itself is one batch; when the driver refuses half way the pools are
in a named state (PARTIAL, or some asleep and the others as before, their hooks undone) that the same sleep, or a wake, leaves
again. It is not rolled back: that would be a wake under a driver that has just failed, without the checks and the reports of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from torpor.errors import DeviceError, StateError, TorporError
from torpor.memory.clock import Phases
from torpor.memory.holders import Account, Traces, account, take_traces
from torpor.memory.hooks import Hook
from torpor.memory.ledger import ExportLedger
from torpor.memory.pool import Pool
from torpor.memory.segment import Segment
from torpor.memory.shared import Shared
from torpor.memory.types import Content, Policy, Residency, SleepReport, TagSleepReport


class Step(enum.Enum):
    NOTHING = "nothing"  # kept, or already as asked (M9)
    UNMAP = "unmap"  # something is mapped, or was not released by the driver last time, or an empty pool is declared asleep
    FORGET = "forget"  # asleep on the host, to be lost: only images go (M8)


@dataclass
class Move:
    pool: Pool
    policy: Policy
    step: Step
    unmapped: list[Segment] = field(default_factory=list)
    copied_bytes: int = 0


def plan_move(pool: Pool, policy: Policy) -> Move:
    """StateError when ``policy`` wants content kept that is lost already."""
    residency, content = pool.state
    if policy == "keep":
        return Move(pool, policy, Step.NOTHING)
    if policy == "host" and content is Content.LOST:
        way_out = f"sleep with 'discard', or fill it and call mark_valid({pool.tag!r})"
        message = f"the content of tag {pool.tag!r} is lost: nothing to copy; {way_out}"
        raise StateError(message, state=residency.value, tag=pool.tag)
    if residency is not Residency.ASLEEP or any(s.region.condemned_bytes for s in pool.segments):
        return Move(pool, policy, Step.UNMAP)
    done = content is Content.ON_HOST if policy == "host" else content is Content.LOST and not _has_images(pool)
    return Move(pool, policy, Step.NOTHING if done else Step.FORGET)


def _has_images(pool: Pool) -> bool:
    return any(s.image is not None for s in pool.segments)


class Sleep:
    """One call of ``Memory.sleep``, under the transaction's lock."""

    def __init__(self, shared: Shared, ledger: ExportLedger, moves: Sequence[Move]) -> None:
        self._shared = shared
        self._ledger = ledger
        self._moves = moves
        self._phases = Phases()
        self._pinned = 0  # what is not known to be memory of tags that stay; an unmap changes nothing of it

    def run(self) -> SleepReport:
        try:
            return self._run()
        finally:
            self._shared.explained_pins = 0

    def _run(self) -> SleepReport:
        unmaps = [m for m in self._moves if m.step is Step.UNMAP]
        for move in unmaps:
            move.pool.require_nobody_inside()
        if unmaps and self._shared.captures:
            message = (
                "a CUDA graph is being captured, which a sleep would break: it waits for the device; sleep after the capture"
            )
            raise StateError(message, state="capturing")
        released, traces = self._prepare(unmaps)
        hooks_s = dict(self._shared.hooks.seconds_of)
        self._unmap(unmaps, released, traces)
        try:
            self._drop_images()
            with self._phases("account"):
                accounts = self._account(traces, unmaps)
        except (TorporError, OSError) as error:
            raise _too_late(self._moves, error) from error
        reports = tuple(_report(m, accounts.get(m.pool.tag)) for m in self._moves)
        return SleepReport(tags=reports, seconds=self._phases.seconds, phases_s=self._phases.seconds_of, hooks_s=hooks_s)

    def _prepare(self, unmaps: list[Move]) -> tuple[list[Hook], list[Traces]]:
        """All that can be undone: M2, M4."""
        losing = [m.pool.tag for m in unmaps if m.pool.mapped_segments()]
        with self._phases("hooks"):
            released = self._shared.hooks.release(losing)
        try:
            for move in unmaps:
                move.pool.shut_torch()
            self._save_images(unmaps)
            if self._shared.on_host:
                self._pinned = self._shared.unexplained_pins({m.pool.tag for m in unmaps})
            return released, [_traces(m.pool, self._shared.explained_pins) for m in unmaps]
        except BaseException as error:
            self._undo(released, error)
            raise

    def _undo(self, released: list[Hook], error: BaseException) -> None:
        for move in self._moves:
            move.pool.settle_torch()
        failures = self._shared.hooks.undo(released)
        if isinstance(error, TorporError):
            error.fields["undo_failures"] = failures

    def _save_images(self, unmaps: list[Move]) -> None:
        hosts = [m for m in unmaps if m.policy == "host"]
        segments = [s for m in hosts for s in m.pool.mapped_segments() if not s.stale]
        copied = self._shared.images.save(segments, self._phases)
        for move in hosts:
            move.copied_bytes = sum(copied.get(s, 0) for s in move.pool.segments)

    def _account(self, traces: list[Traces], unmaps: list[Move]) -> dict[str, Account]:
        return account(traces, {m.pool.tag: m.unmapped for m in unmaps}, self._ledger, self._pinned)

    def _unmap(self, unmaps: list[Move], released: list[Hook], traces: list[Traces]) -> None:
        """What the tags' content is, is said before the memory goes: whatever interrupts this, nothing lost counts as valid."""
        for move in unmaps:
            move.unmapped = move.pool.mapped_segments()
        was_lost = {m.pool: m.pool.lost for m in unmaps}
        was_stale = {s for m in unmaps for s in m.unmapped if s.stale}
        for move in unmaps:
            move.pool.lost = move.policy == "discard"
            for segment in move.unmapped:
                segment.stale = segment.fresh = True
        try:
            with self._phases("unmap"):
                self._shared.device.unmap([s.region for m in unmaps for s in m.pool.segments])
        except TorporError as error:
            _take_stock(unmaps, was_lost, was_stale)
            failure = _half_way(unmaps, error)
            with contextlib.suppress(TorporError, OSError):  # no later report knows of what went now
                accounts = self._account(traces, unmaps)
                failure.fields["holders"] = {tag: a.holders for tag, a in accounts.items() if a.holders}
            whole = {m.pool.tag for m in unmaps if m.pool.residency is Residency.RESIDENT}
            self._undo([hook for hook in released if hook.tag in whole], failure)
            raise failure from error
        for move in unmaps:
            move.pool.slept = True
            _mark_unmapped(move.unmapped)

    def _drop_images(self) -> None:
        """The owner of a discarded tag said that its content is worth nothing; its host memory goes too (M8)."""
        for move in self._moves:
            if move.policy == "discard" and move.step is not Step.NOTHING:
                move.pool.lost = True
                for segment in move.pool.segments:
                    self._shared.images.release(segment)


def _traces(pool: Pool, explained_pins: int) -> Traces:
    traces = take_traces(pool.tag, pool.mapping, bool(pool.settings.exportable), pool.mapped_segments())
    return dataclasses.replace(traces, pinned_at_map=max(traces.pinned_at_map, explained_pins))


def _mark_unmapped(segments: list[Segment]) -> None:
    for segment in segments:
        segment.exported = False


def _take_stock(unmaps: list[Move], was_lost: dict[Pool, bool], was_stale: set[Segment]) -> None:
    """After a batch that stopped half way: what is still mapped holds what it held."""
    for move in unmaps:
        still = move.pool.mapped_segments()
        for segment in still:
            segment.stale = segment.fresh = segment in was_stale
        move.unmapped = [s for s in move.unmapped if s not in still]
        _mark_unmapped(move.unmapped)
        if not move.unmapped:
            move.pool.lost = was_lost[move.pool]
        move.pool.slept = move.pool.slept or not still


def _half_way(unmaps: list[Move], error: TorporError) -> DeviceError:
    states = {m.pool.tag: m.pool.residency.value for m in unmaps}
    message = f"unmapping failed: {error}; tags are {states}; repeat the sleep to go on, or wake to go back"
    return DeviceError(message, **{**error.fields, "residency": states})


def _too_late(moves: Sequence[Move], error: TorporError | OSError) -> DeviceError:
    """Of what comes after the unmap: the memory is gone, and only the report of it is missing, or images that nobody needs are
    left."""
    states = {m.pool.tag: m.pool.residency.value for m in moves}
    fields = error.fields if isinstance(error, TorporError) else {"code": error.errno or 0}
    message = f"everything is unmapped, but then: {error}; tags are {states}"
    return DeviceError(message, **{"operation": "account", "code": 0, **fields, "residency": states})


def _report(move: Move, found: Account | None) -> TagSleepReport:
    return TagSleepReport(
        tag=move.pool.tag,
        policy=move.policy,
        unmapped_bytes=found.unmapped_bytes if found else 0,
        returned_bytes=found.returned_bytes if found else 0,
        image_bytes=sum(s.image_bytes for s in move.pool.segments),
        copied_bytes=move.copied_bytes,
        holders=found.holders if found else (),
        noop=move.step is Step.NOTHING,
    )
