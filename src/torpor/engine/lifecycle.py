"""The one place that orders sleep and wake (E2, E3, E6-E8).

    sleep   stop admission > quiesce > [memory transaction: connectors release, images, unmap] > indexes over lost content die
    update  [new checkpoint checked and hashed, old images given up] > KV of the old weights is nobody's any more
    wake    [memory transaction: map, restore, connectors come back] > refill lost weights > metadata published > admission opens

Everything here runs on the engine's loop thread and never blocks: a drain is looked at once per step, and the memory transaction
(in brackets) runs on one background thread while the loop goes on answering calls. The scheduler and the executor are not touched
by the loop during a transaction, except that requests may be queued and aborted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torpor.engine.base import EngineState, SleepMode, SleepRequest
from torpor.engine.executor import KV_CACHE, Executor
from torpor.engine.lifecycle_parts import Background, Drain, Job, LifecycleScheduler, Queued, Work
from torpor.engine.reports import paused_report, resumed_report, slept_report, updated_report, wake_report
from torpor.engine.sleep_plan import SleepPlan, SleepRules, check_tags
from torpor.engine.tickets import Ticket, complete, fail, names, stopped, told
from torpor.errors import BugError, EngineDeadError, HookError, SleepAborted, StateError, TorporError
from torpor.memory.types import Content, MemoryStats, Residency, SleepReport, WakeReport

_S = EngineState
MOVES: dict[EngineState, frozenset[EngineState]] = {
    _S.STARTING: frozenset({_S.AWAKE, _S.DEAD}),
    _S.AWAKE: frozenset({_S.DRAINING, _S.DEAD}),
    _S.PAUSED: frozenset({_S.AWAKE, _S.DRAINING, _S.DEAD}),
    _S.DRAINING: frozenset({_S.AWAKE, _S.PAUSED, _S.SLEEPING, _S.DEAD}),
    _S.SLEEPING: frozenset({_S.ASLEEP, _S.AWAKE, _S.PAUSED, _S.DEAD}),
    _S.ASLEEP: frozenset({_S.SLEEPING, _S.WAKING, _S.DEAD}),
    _S.WAKING: frozenset({_S.AWAKE, _S.ASLEEP, _S.DEAD}),
    _S.DEAD: frozenset(),
}


class Lifecycle:
    """Owns the engine's state. Not thread-safe: the loop thread's. Tickets of accepted calls complete during ``tick``."""

    def __init__(
        self,
        *,
        scheduler: LifecycleScheduler,
        executor: Executor,
        rules: SleepRules,
        background: Background,
        abort_all: Callable[[], bool],
        reset_cache: Callable[[], None],
        publish: Callable[[], None],
        set_version: Callable[[str], None] = lambda version: None,
        on_state: Callable[[EngineState], None] = lambda state: None,
        on_ready: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``abort_all`` ends every request and says whether there was one; ``reset_cache`` empties the prefix cache (nothing is
        allocated then); ``publish`` gives the worker connector's handshake metadata to the scheduler side; ``set_version`` tells
        everybody who keeps or moves KV what weights it is of; ``on_ready`` is called, from another thread, when a tick would find
        that a transaction has ended."""
        self._scheduler = scheduler
        self._executor = executor
        self._rules = rules
        self._background = background
        self._abort_all = abort_all
        self._reset_cache = reset_cache
        self._publish = publish
        self._set_version = set_version
        self._on_state = on_state
        self._on_ready = on_ready
        self._clock = clock
        self._state = EngineState.STARTING
        self._drain: Drain | None = None
        self._job: Job | None = None
        self._queue: deque[Queued] = deque()
        self._memory = executor.memory_stats()

    # ---- what is asked of it -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def in_transaction(self) -> bool:
        """Memory is being unmapped or mapped: neither the executor nor a step may run."""
        return self._state in (_S.SLEEPING, _S.WAKING)

    @property
    def turns_requests_away(self) -> bool:
        """Asleep, or on the way in or out (E10). A pause is not a sleep: its requests wait."""
        return self._state in (_S.SLEEPING, _S.ASLEEP, _S.WAKING) or (self._drain is not None and self._drain.plan.unmaps)

    @property
    def busy(self) -> bool:
        """Something is under way that ``tick`` must look at."""
        return self._drain is not None or self._job is not None or bool(self._queue)

    @property
    def tells_in_s(self) -> float | None:
        """When a transaction that has not ended says where it is; None without one."""
        return None if self._job is None else self._job.tells_in(self._clock())

    def memory_stats(self) -> MemoryStats:
        """Fresh; during a transaction the snapshot from before it."""
        if not self.in_transaction:
            self._memory = self._executor.memory_stats()
        return self._memory

    def missing_tags(self, stats: MemoryStats) -> list[str]:
        """The pools that keep the engine from serving: not resident, not valid, or mapped with a hook that has not come back."""
        return sorted(
            t.tag for t in stats.tags if t.residency is not Residency.RESIDENT or t.content is not Content.VALID or t.hooks_away
        )

    # ---- calls: each returns a ticket at once --------------------------------------------------------------------------------

    def open(self) -> None:
        """Start-up is complete: serve."""
        self._move(_S.AWAKE)
        self._scheduler.open_admission()

    def sleep(self, request: SleepRequest) -> Ticket:
        return self._call(lambda ticket: self._sleep(self._rules.plan(request, self._known_tags()), ticket))

    def release_kv_cache_memory(self) -> Ticket:
        """Discard the KV cache alone; running requests finish first, under the default deadline."""
        request = SleepRequest(mode="wait", policies={KV_CACHE: "discard"})
        return self._call(lambda ticket: self._sleep(self._rules.plan(request, self._known_tags(), "release_kv_cache"), ticket))

    def pause(self, mode: SleepMode = "keep") -> Ticket:
        request = SleepRequest(level=0, mode=mode)
        return self._call(lambda ticket: self._sleep(self._rules.plan(request, self._known_tags(), "pause"), ticket))

    def wake_up(self, tags: Sequence[str] | None = None) -> Ticket:
        return self._call(lambda ticket: self._wake(tags, ticket))

    def resume(self) -> Ticket:
        return self._call(self._resume)

    def update_weights(self, source: str) -> Ticket:
        """The checkpoint that the next wake fills the weights from."""
        return self._call(lambda ticket: self._update(source, ticket))

    def tick(self) -> None:
        """One look at what is under way. Call it once per step; never blocks."""
        if self._drain is not None:
            self._look_at_drain(self._drain)
        job = self._job
        if job is not None and job.future.done():
            self._job = None
            job.finish(job.future)
        elif job is not None:
            job.tell(self._clock())
        while self._queue and self._drain is None and self._job is None:
            call = self._queue.popleft()
            self._attempt(call.start, call.ticket)

    def die(self, error: TorporError) -> None:
        """No more moves; every open ticket fails with ``error``. Blocks until a transaction under way has ended. Idempotent."""
        if self._state is _S.DEAD:
            return
        job, drain = self._job, self._drain
        tickets = [*(job.tickets if job else ()), *(drain.tickets if drain else ()), *(call.ticket for call in self._queue)]
        if job is not None:
            job.wait(self._clock)
        self._job = self._drain = None
        self._queue.clear()
        self._move(_S.DEAD)
        fail(tickets, error)

    # ---- sleep ---------------------------------------------------------------------------------------------------------------

    def _sleep(self, plan: SleepPlan, ticket: Ticket) -> None:
        self._check_alive(plan.operation)
        match self._state:
            case _S.DRAINING:
                self._join(plan, ticket)
            case _S.SLEEPING | _S.WAKING:
                self._queue.append(Queued(lambda later: self._sleep(plan, later), ticket, sleeps=True))
            case _S.ASLEEP:
                self._sleep_deeper(plan, ticket)
            case _:
                self._begin_drain(plan, ticket)

    def _begin_drain(self, plan: SleepPlan, ticket: Ticket) -> None:
        if self._state is _S.PAUSED and not plan.unmaps and plan.mode != "abort":
            return ticket.set_result(paused_report(plan, self._state, 0.0, noop=True, reason="already paused"))
        self._drain = Drain(plan=plan, origin=self._state, started=self._clock(), tickets=[ticket])
        self._move(_S.DRAINING)
        self._scheduler.close_admission()
        if plan.mode == "abort":
            self._drain.ended_requests = self._abort_all()
        elif plan.mode == "keep":
            self._scheduler.cancel_loads()
        return None

    def _join(self, plan: SleepPlan, ticket: Ticket) -> None:
        assert self._drain is not None
        present = self._drain.plan
        if plan != present:
            raise StateError(
                f"{plan.operation}: the engine is draining for another {present.operation} (level {present.level}, "
                f"mode {present.mode}); wait for it, or cancel it with wake_up()",
                state=self._state.value,
            )
        self._drain.tickets.append(ticket)

    def _look_at_drain(self, drain: Drain) -> None:
        plan, scheduler = drain.plan, self._scheduler
        if not scheduler.has_loading and (plan.mode == "keep" or not scheduler.has_running):
            self._drained(drain)
        elif self._clock() >= drain.started + plan.deadline_s:
            waiting_for = [*scheduler.running_ids(), *scheduler.loading_ids()] or ["loads that are being cancelled"]
            message = f"{plan.operation}: not finished after {plan.deadline_s:g} s: {names(waiting_for)}; nothing was unmapped. "
            self._end_drain("deadline", message + "Raise deadline_s, or use mode 'abort' or 'keep'", waiting_for)

    def _drained(self, drain: Drain) -> None:
        self._drain = None
        self._scheduler.freeze()
        drain_s = self._clock() - drain.started
        if drain.plan.unmaps:
            self._unmap(drain, drain_s)
        else:
            self._move(_S.PAUSED)
            noop = drain.origin is _S.PAUSED and not drain.ended_requests
            reason = "already paused" if noop else None
            complete(drain.tickets, paused_report(drain.plan, self._state, drain_s, noop=noop, reason=reason))

    def _end_drain(self, reason: str, message: str, waiting_for: Sequence[str] = ()) -> None:
        """The sleep is off: everything is as it was before it (E2)."""
        drain, self._drain = self._drain, None
        assert drain is not None
        self._go_back(drain.origin)
        fail(drain.tickets, SleepAborted(message, reason=reason, waiting_for=names(waiting_for), state=self._state.value))

    def _cancel_drain(self, reason: str, message: str) -> None:
        """Somebody wants the engine awake: also one that was paused before, and in spite of sleeps that wait behind this one."""
        drain = self._drain
        assert drain is not None
        self._end_drain(reason, message)
        queued = [call for call in self._queue if call.sleeps]
        self._queue = deque(call for call in self._queue if not call.sleeps)
        fail([call.ticket for call in queued], SleepAborted(message, reason=reason, waiting_for="", state=self._state.value))
        if drain.origin is _S.PAUSED:
            self._reopen()

    def _sleep_deeper(self, plan: SleepPlan, ticket: Ticket) -> None:
        """From one asleep state to another without waking (M8); the memory layer says when nothing is left to do (M9). Nothing
        runs that could be waited for: only ``abort`` means something to the requests that are frozen or queued."""
        ended = plan.mode == "abort" and self._abort_all()
        if plan.unmaps:
            drain = Drain(plan=plan, origin=self._state, started=self._clock(), tickets=[ticket], ended_requests=ended)
            self._unmap(drain, 0.0)
        else:
            reason = None if ended else "the engine is asleep: nothing runs"
            ticket.set_result(paused_report(plan, self._state, 0.0, noop=not ended, reason=reason))

    def _unmap(self, drain: Drain, drain_s: float) -> None:
        self._move(
            _S.SLEEPING,
            lambda: self._executor.sleep(drain.plan.policies),
            lambda f: self._unmapped(drain, drain_s, f),
            drain.tickets,
        )

    def _unmapped(self, drain: Drain, drain_s: float, future: Future[SleepReport]) -> None:
        error = future.exception()
        missing = self._settle()
        if error is None:
            self._move(_S.ASLEEP)
            report, took = future.result(), self._clock() - drain.started
            noop = report.noop and drain.origin is _S.ASLEEP and not drain.ended_requests
            return complete(drain.tickets, slept_report(drain.plan, self._state, report, took, drain_s, noop=noop))
        # After a failure the engine counts as asleep if any content or memory is gone (E9, M12); else nothing has happened.
        if missing or drain.origin is _S.ASLEEP:
            self._move(_S.ASLEEP)
        else:
            self._go_back(drain.origin)
        state = self._state.value
        nothing_unmapped = isinstance(error, HookError) and self._state is not _S.ASLEEP
        return fail(drain.tickets, stopped(error, state) if nothing_unmapped else told(error, state))

    # ---- wake ----------------------------------------------------------------------------------------------------------------

    def _wake(self, tags: Sequence[str] | None, ticket: Ticket) -> None:
        self._check_alive("wake_up")
        if tags is not None:
            check_tags(tags, self._known_tags())
        match self._state:
            case _S.AWAKE:
                ticket.set_result(wake_report(None, self._state, reason="already awake", noop=True))
            case _S.PAUSED:
                self._reopen()
                ticket.set_result(wake_report(None, self._state, reason="resumed; nothing was asleep", noop=False))
            case _S.DRAINING:
                what = "pause" if self._drain is not None and self._drain.plan.operation == "pause" else "sleep"
                self._cancel_drain("woken", "the sleep was cancelled by a wake_up while it drained (E8): the engine is awake")
                ticket.set_result(wake_report(None, self._state, reason=f"cancelled the {what} that was draining", noop=False))
            case _S.SLEEPING | _S.WAKING:
                self._queue.append(Queued(lambda later: self._wake(tags, later), ticket))
            case _:
                self._map(tags, ticket)

    def _map(self, tags: Sequence[str] | None, ticket: Ticket) -> None:
        started, missing = self._clock(), self.missing_tags(self.memory_stats())

        def work() -> tuple[WakeReport, list[str], float]:
            report = self._executor.wake(tags)
            mapped = self._clock()
            return report, self._executor.refill_lost(), self._clock() - mapped

        self._move(_S.WAKING, work, lambda future: self._mapped(started, missing, ticket, future), [ticket])

    def _mapped(
        self, started: float, missing_before: list[str], ticket: Ticket, future: Future[tuple[WakeReport, list[str], float]]
    ) -> None:
        error = future.exception()
        missing = self._settle()
        if error is not None:
            self._move(_S.ASLEEP)
            return fail([ticket], told(error, self._state.value))
        if missing:
            self._move(_S.ASLEEP)
        else:
            self._reopen()
        report, refilled, refill_s = future.result()
        reason = f"not serving: {', '.join(missing)} still missing" if missing else None
        # A wake that maps nothing may still have brought a hook back (M3), or opened admission.
        noop = report.noop and not refilled and self._state is _S.ASLEEP and missing == missing_before
        took = self._clock() - started
        text = wake_report(
            report, self._state, missing=missing, refilled=refilled, seconds=took, refill_s=refill_s, reason=reason, noop=noop
        )
        return complete([ticket], text)

    def _settle(self) -> list[str]:
        """After any transaction, also a failed one: what lost its memory loses its readers and its indexes in this very step
        (E6), and the connector's new registration is published before admission can open. Returns the tags that keep the
        engine from serving."""
        stats = self._memory = self._executor.memory_stats()
        kv = next((tag for tag in stats.tags if tag.tag == KV_CACHE), None)
        if kv is not None and (kv.residency is not Residency.RESIDENT or kv.content is Content.LOST):
            self._scheduler.end_hand_offs()
            if kv.content is Content.LOST:
                self._reset_cache()
                if kv.residency is Residency.RESIDENT:
                    self._executor.mark_valid(KV_CACHE)
                    stats = self._memory = self._executor.memory_stats()
        self._publish()
        return self.missing_tags(stats)

    # ---- weights -------------------------------------------------------------------------------------------------------------

    def _update(self, source: str, ticket: Ticket) -> None:
        self._check_alive("update_weights")
        if self.in_transaction:
            self._queue.append(Queued(lambda later: self._update(source, later), ticket))
            return
        self._rules.check_update(self._state, self.memory_stats())
        started = self._clock()
        self._move(
            _S.SLEEPING,
            lambda: self._executor.update_weights(source),
            lambda future: self._updated(source, started, ticket, future),
            [ticket],
        )

    def _updated(self, source: str, started: float, ticket: Ticket, future: Future[str]) -> None:
        error = future.exception()
        self._settle()
        if error is None:
            self._set_version(future.result())
        self._move(_S.ASLEEP)
        if error is not None:
            return fail([ticket], told(error, self._state.value))
        return complete([ticket], updated_report(self._state, source, future.result(), self._clock() - started))

    # ---- pause and resume ----------------------------------------------------------------------------------------------------

    def _resume(self, ticket: Ticket) -> None:
        self._check_alive("resume")
        noop, reason = False, None
        if self._state is _S.DRAINING and self._drain is not None and not self._drain.plan.unmaps:
            self._cancel_drain("resumed", "the pause was cancelled by resume() while it drained: the engine is awake")
            reason = "cancelled the pause that was draining"
        elif self._state is _S.PAUSED:
            self._reopen()
        elif self._state is _S.AWAKE:
            noop, reason = True, "not paused"
        else:
            raise StateError(
                f"resume() ends a pause, but the engine is {self._state.value}: call wake_up()", state=self._state.value
            )
        ticket.set_result(resumed_report(self._state, noop=noop, reason=reason))

    # ---- moves ---------------------------------------------------------------------------------------------------------------

    def _move(
        self,
        to: EngineState,
        work: Callable[[], Any] | None = None,
        finish: Callable[[Future[Any]], None] | None = None,
        tickets: Sequence[Ticket] = (),
    ) -> None:
        """The one function that changes the state. With ``work``, that transaction begins and ``finish`` gets its outcome in a
        later tick."""
        if to not in MOVES[self._state]:
            raise BugError(f"the engine cannot go from {self._state.value} to {to.value}")
        if work is not None:
            self._memory = self._executor.memory_stats()
        self._state = to
        self._on_state(to)
        if work is not None and finish is not None:
            now, watched = self._clock(), Work(work)
            future = self._background.submit(watched)
            self._job = Job(name=to.value, work=watched, future=future, finish=finish, tickets=tickets, started=now, told=now)
            future.add_done_callback(lambda _: self._on_ready())

    def _reopen(self) -> None:
        self._move(_S.AWAKE)
        self._scheduler.open_admission()

    def _go_back(self, origin: EngineState) -> None:
        self._move(origin)
        if origin is _S.AWAKE:
            self._scheduler.open_admission()

    # ---- helpers -------------------------------------------------------------------------------------------------------------

    def _call(self, start: Callable[[Ticket], None]) -> Ticket:
        ticket: Ticket = Future()
        self._attempt(start, ticket)
        return ticket

    def _attempt(self, start: Callable[[Ticket], None], ticket: Ticket) -> None:
        try:
            start(ticket)
        except BugError:
            raise
        except TorporError as error:
            fail([ticket], error)

    def _check_alive(self, what: str) -> None:
        if self._state is _S.DEAD:
            raise EngineDeadError(f"{what}: the engine is shut down")
        if self._state is _S.STARTING:
            raise StateError(f"{what}: the engine is still starting; wait until it is awake", state=self._state.value)

    def _known_tags(self) -> list[str]:
        return [tag.tag for tag in self._memory.tags]
