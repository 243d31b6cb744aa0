"""What is looked at after every rule of ``engine_machine``: the state against ``engine_model``, answers against the reference."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

from checked_worker import CheckedWorker, reference
from engine_model import TURNS_AWAY, Call, Pools, S
from hypothesis.stateful import RuleBasedStateMachine, invariant
from step_counter import count
from stepped_client import Events, SteppedClient, Stream

from torpor.engine.base import EngineState
from torpor.engine.config import EngineConfig
from torpor.engine.core import EngineCore
from torpor.engine.lifecycle import MOVES
from torpor.errors import EngineDeadError, ModelError, SleepAborted, StateError, TorporError
from torpor.memory import Content
from torpor.request import FinishReason
from torpor.testing.clock import FakeClock
from torpor.testing.engine import FakeConnector, FakeConnectorWorker, ManualBackground, fake_core

MAX_MODEL_LEN = 40
SETTLE_STEPS = 3000
IN_TRANSACTION = (S.SLEEPING, S.WAKING)


class EngineChecks(RuleBasedStateMachine):
    """An engine whose calls, time and transactions are in the hands of rules; no rules yet."""

    client: SteppedClient | None = None
    calling: Call | None = None  # one that has not returned its ticket yet

    def set_up(self, config: EngineConfig, num_blocks: int, connected: bool) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.connected = connected
        self.context_len = min(MAX_MODEL_LEN, num_blocks * 4)
        self.clock = FakeClock()
        self.events = Events()
        self.streams: dict[str, Stream] = {}
        self.found: list[Exception] = []  # by checks at the end of a call: a future drops what its callbacks raise
        self.names = itertools.count()
        self.boot()

    def boot(self) -> None:
        self.background = ManualBackground()
        self.worker = CheckedWorker(num_blocks=self.num_blocks)
        self.states: list[EngineState] = [S.STARTING]
        self.pools = Pools()
        self.calls: list[Call] = []
        self.added = 0
        self.drain_started = 0.0
        self.wakes_itself = False  # the present wake is that of requests that came while it slept (E10)
        self.faulty = False  # something was told to fail: what the pools are is asked, not predicted
        self.client = self.events.client(self._factory)
        assert self.core.state is S.AWAKE

    def _factory(self, **callbacks: Any) -> EngineCore:
        told: Callable[[EngineState], None] = callbacks.pop("on_state")

        def on_state(state: EngineState) -> None:
            self._moved(state)
            told(state)

        return fake_core(
            self.config,
            self.worker,
            connector=FakeConnector if self.connected else None,
            max_model_len=MAX_MODEL_LEN,
            background=self.background,
            clock=self.clock,
            on_state=on_state,
            **callbacks,
        )

    # ---- what rules need -----------------------------------------------------------------------------------------------------

    @property
    def core(self) -> EngineCore:
        assert self.client is not None
        return self.client.core

    @property
    def link(self) -> FakeConnectorWorker:
        assert isinstance(self.worker.connector, FakeConnectorWorker)
        return self.worker.connector

    def draining_for(self) -> Call | None:
        """The call that the present drain is for: the oldest that is still open."""
        if self.core.state is not S.DRAINING:
            return None
        return next((c for c in self.calls if c.sleeps and not c.ticket.done()), self.calling)

    def turns_away(self) -> bool:
        draining = self.draining_for()
        return self.core.state in TURNS_AWAY or (draining is not None and draining.unmaps)

    def called(self, what: str, call: Callable[[], Any], **asked: Any) -> Call:
        before, draining, queue = self.core.state, self.draining_for(), self.core.scheduler
        requests = bool(queue.running_ids() or queue.loading_ids() or queue.waiting_ids())
        made = self.calling = Call(
            what=what,
            ticket=None,
            asked_in=before,
            draining=draining,
            requests=requests,
            **asked,  # type: ignore[arg-type]
        )
        made.ticket = call()
        self.calling = None
        self.calls.append(made)
        made.ticket.add_done_callback(lambda _: self._end_of(made))
        return made

    def open_names(self) -> list[str]:
        return sorted(name for name, stream in self.streams.items() if stream.open)

    def step(self) -> None:
        assert self.client is not None
        drained_before = self.draining_for()
        self.client.step()
        self.events.pump()
        self._look_after_step(drained_before)

    # ---- at every move and every end of a call -------------------------------------------------------------------------------

    def _moved(self, state: EngineState) -> None:
        assert state in MOVES[self.states[-1]], f"{self.states[-1]} > {state}"
        if state is S.WAKING:
            wakes = [*self.calls, *([self.calling] if self.calling else [])]
            self.wakes_itself = not any(c.what == "wake" and (c.ticket is None or not c.ticket.done()) for c in wakes)
        elif self.states[-1] is S.WAKING and self.wakes_itself:
            assert self.config.sleep.while_asleep == "wake", "it wakes, and nobody has asked for it"
            count("wake > for a request")
            self.pools.wake(None)
        self.states.append(state)
        if self.states[-2:] == [S.ASLEEP, S.SLEEPING]:
            begins = next((c for c in self.calls if not c.ticket.done()), self.calling)
            assert begins is not None
            self._check_aborted(begins)
        if state is not S.DRAINING or self.client is None:
            return
        self.drain_started = self.clock()
        call = next((c for c in self.calls if c.sleeps and not c.ticket.done()), self.calling)
        assert call is not None
        if call.mode == "abort":
            for name in self.open_names():
                self.streams[name].may_abort = True

    def _check_aborted(self, call: Call) -> None:
        """Of a sleep or a pause of an engine that is asleep, when it begins or has ended: nobody is left."""
        if call.mode == "abort":
            assert self.core.scheduler.num_waiting == 0, "requests outlived an abort"
            for name in self.open_names():
                self.streams[name].may_abort = True

    def _end_of(self, call: Call) -> None:
        try:
            self.call_ended(call)
        except Exception as error:
            self.found.append(error)

    def tell(self) -> None:
        if self.found:
            raise self.found[0]

    def call_ended(self, call: Call) -> None:
        """Called at the moment a ticket completes."""
        error = call.ticket.exception(0)
        outcome = type(error).__name__ if error is not None else "no-op" if call.report.get("noop") else call.report["state"]
        count(f"{call.what} > {outcome}")
        if error is not None:
            self._check_failure(call, error)
        elif call.what == "update":
            self._updated(call)
        elif call.sleeps and not call.unmaps and self.core.state is S.ASLEEP:
            self._check_aborted(call)
        elif call.sleeps and not call.unmaps and call.asked_in in (S.AWAKE, S.PAUSED):
            assert call.report["noop"] is (call.asked_in is S.PAUSED and not (call.mode == "abort" and call.requests)), (
                call.report
            )
        elif call.sleeps and call.unmaps:
            assert call.report["state"] == self.core.state.value == "asleep"
            if call.asked_in is S.DRAINING:  # it joined the sleep that the drain was for, and shares its report
                assert call.draining is not None
                assert call.report == call.draining.report
                return
            noop = self.pools.sleep(call.policies)
            if call.mode == "abort":  # it may have ended requests
                assert self.faulty or noop or not call.report["noop"], (call.report, noop)
            else:
                assert self.faulty or call.report["noop"] is noop, (call.report, noop)
            assert call.report["returned_bytes"] == call.report["unmapped_bytes"]
        elif call.what == "wake" and call.report["tags"]:
            self._check_woken(call)

    def _check_woken(self, call: Call) -> None:
        refilled = self.pools.wake(call.tags)
        assert not call.report["noop"] or self.states[-3:] == [S.ASLEEP, S.WAKING, S.ASLEEP]
        if self.faulty:
            return
        assert sorted(call.report["refilled_tags"]) == sorted(refilled), call.report
        assert call.report["missing_tags"] == self.pools.missing()
        assert call.report["state"] == ("asleep" if self.pools.missing() else "awake")

    def _updated(self, call: Call) -> None:
        """Whoever is not answered yet goes on with the new weights (the engine sleeps, so all that was said has been heard)."""
        self.events.pump()
        present = self.core.scheduler._queues.by_id
        self.pools.update()
        self.worker.version = call.version
        for name in self.open_names():
            stream = self.streams[name]
            assert name not in present or len(stream.tokens) == len(present[name].outputs)
            stream.versions += ((len(stream.tokens), call.version),)

    def _check_failure(self, call: Call, error: BaseException) -> None:
        assert isinstance(error, TorporError), repr(error)
        if isinstance(error, SleepAborted):
            assert call.sleeps
            assert self.core.state in (S.AWAKE, S.PAUSED)
            match error.fields["reason"]:
                case "deadline":
                    assert self.clock() >= self.drain_started + call.deadline_s
                case "hook":
                    assert self.faulty
                case reason:
                    assert reason in ("woken", "resumed")
        elif call.what == "update" and not call.version:
            assert isinstance(error, (ModelError, StateError, EngineDeadError))
        elif not isinstance(error, (EngineDeadError, StateError)):
            assert self.faulty, f"{call.what} failed without a cause: {error!r}"
        elif isinstance(error, StateError) and call.unmaps and not self.faulty:
            assert self.pools.cannot(call.policies) or self.core.state in (S.DRAINING, *TURNS_AWAY), repr(error)

    def _look_after_step(self, drained_before: Call | None) -> None:
        """A drain is looked at in every step, but not in the one that it begins in."""
        draining = self.draining_for()
        if draining is not None and draining is drained_before:
            queues = self.core.stats().scheduler
            held_up = queues.loading + queues.cancelling
            if draining.mode == "wait":
                held_up += queues.running + queues.preempted
            assert held_up, "it drains for nothing"
            assert self.clock() < self.drain_started + draining.deadline_s, "the deadline has passed (E2)"
        if self.faulty and self.core.state not in IN_TRANSACTION:
            self._take_stock()

    def _take_stock(self) -> None:
        stats = self.core.stats().memory
        asked = {tag for c in self.calls if c.sleeps for tag, policy in c.policies.items() if policy == "discard"}
        asked |= {"weights" for c in self.calls if c.what == "update"}
        for tag in ("weights", "runtime"):
            assert stats.tag(tag).content is not Content.LOST or tag in asked, f"{tag} is lost, and nobody asked for it (M12)"
        self.pools.look(stats)
        if self.core.state is S.AWAKE and not stats.condemned_bytes and all(c.ticket.done() for c in self.calls):
            self.faulty = False

    # ---- after every rule ----------------------------------------------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        if self.client is None:
            return
        self.tell()
        assert not self.worker.wrong, self.worker.wrong
        self.core.scheduler.check_integrity()
        stats, state = self.core.stats(), self.core.state
        assert stats.state is state
        counted = stats.scheduler
        live = counted.waiting + counted.running + counted.preempted + counted.loading
        assert counted.finished + counted.aborted + counted.failed + live == self.added
        if state in IN_TRANSACTION:
            return
        self.worker.memory.check_integrity()
        assert stats.model_id == f"fake@{self.worker.version}"
        if not self.faulty:
            self.pools.check(stats.memory)
        if stats.memory.tag("kv_cache").content is Content.LOST:
            assert stats.cache.cached_blocks == 0, "the prefix cache outlived its content (E6)"
        if state in (S.AWAKE, S.PAUSED):
            assert stats.missing_tags == ()
            assert counted.admission_open == (state is S.AWAKE)

    @invariant()
    def answers_are_those_of_the_reference(self) -> None:
        for stream in self.streams.values() if self.client is not None else ():
            self._check_answer(stream)

    def _check_answer(self, stream: Stream) -> None:
        if failure := stream.failure():
            raise failure
        request = stream.request
        text, reason = reference(tuple(request.prompt_token_ids), request.sampling, self.context_len, stream.versions)
        said = tuple(stream.tokens)
        assert said == text[: len(said)], f"{request.request_id} said {said}, the reference says {text}"
        assert len(said) < len(text) or stream.end is not None
        if stream.end is None:
            return
        match stream.end.finish_reason:
            case FinishReason.ABORT:
                assert stream.may_abort, f"{request.request_id} was aborted by nobody"
            case FinishReason.ERROR:
                parked = stream.while_asleep and self.config.sleep.while_asleep == "wake"
                assert request.request_id in self.worker.broken or parked, stream.end
            case other:
                assert (said, other) == (text, reason)

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        assert self.client is not None
        self.background.run()
        self.events.shutdown(self.client)
        assert self.core.state is S.DEAD
        for stream in self.streams.values():
            assert not stream.open, "a reader hangs"
            self._check_answer(stream)
        assert all(c.ticket.done() for c in self.calls), "a call hangs"
        self.tell()
        self.streams.clear()

    def _settle(self) -> None:
        for _ in range(SETTLE_STEPS):
            self.background.run()
            if self.connected:
                self.link_lets_go()
            self.step()
            if self.core.wait_s() is None and not self.background.pending:
                return
        raise AssertionError(f"the engine does not come to rest: {self.core.state}, {self.core.stats().scheduler}")

    def link_lets_go(self) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        if self.client is None:
            return
        try:
            if sys.exc_info()[0] is None:  # nothing has failed so far
                self._go_home()
                self.shut_down()
        finally:
            self.background.run()
            with contextlib.suppress(Exception):
                self.core.shutdown()
            self.events.close()

    def _go_home(self) -> None:
        """Whatever happened: one wake, and everybody is served."""
        self._settle()
        woken = self.called("wake", self.core.wake_up)
        self._settle()
        assert woken.report["state"] == "awake" == self.core.state.value
        assert not self.open_names(), "requests that are never answered"
        for stream in self.streams.values():
            self._check_answer(stream)
            count("answer > " + (stream.end.finish_reason.value if stream.end and stream.end.finish_reason else "left"))
            assert stream.left or stream.end is not None or stream.error is not None
        stats = self.core.stats()
        assert stats.cache.free_blocks == stats.cache.num_blocks, "blocks leak"
        assert not self.worker.wrong, self.worker.wrong
