"""E1-E10 in any order: requests, aborts, clients that leave, every kind of sleep, wakes of some pools, pauses, releases, failing
steps, drivers and hooks, restarts; against ``engine_model``. Time and memory transactions are manual, so that everything shrinks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from actions import Action, action, one_of
from checked_worker import EOS_IDS
from engine_checks import EngineChecks
from engine_model import (
    TAGS,
    Call,
    S,
    policies_of,
    state_after_resume,
    state_after_sleep,
    state_after_update,
    state_after_wake,
)
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from step_counter import count_machine, count_step

from torpor._native import Op
from torpor.connectors.base import Finished
from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.engine.core import MAX_FAILED_STEPS
from torpor.errors import AsleepError, CapacityError, DeviceError, SleepAborted, StateError, TorporError, TransportError
from torpor.kvcache.config import CacheConfig
from torpor.models.config import ModelConfig
from torpor.request import GenerationRequest, SamplingParams
from torpor.scheduler.config import SchedulerConfig
from torpor.testing.driver import Fault

RETRY_S = 7.0
DEFAULT_DEADLINE_S = 60.0
STEPS_TO_AN_END = 40

prompts = st.one_of(  # few texts, so that prompts share blocks
    st.builds(lambda length, tail: [*range(length), *tail], st.integers(1, 13), st.lists(st.integers(90, 91), max_size=2)),
    st.builds(lambda first, length: [first] * 4 + [7] * length, st.integers(0, 1), st.integers(1, 9)),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    min_tokens=st.sampled_from([0, 0, 2, 20]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), tuple(range(0, 251, 40))]),
)
transfers = st.sampled_from([None, None, {"load": 4}, {"hand_off": True}])
modes = st.sampled_from(["abort", "wait", "keep"])
policies = st.dictionaries(st.sampled_from(TAGS), st.sampled_from(["keep", "host", "discard"]))
deadlines = st.sampled_from([None, 0.0, 5.0, 100.0])
some_tags = st.none() | st.lists(st.sampled_from(TAGS), unique=True)
driver_faults = st.none() | st.tuples(
    st.sampled_from([Op.CREATE, Op.MAP, Op.UNMAP, Op.RELEASE, Op.COPY, Op.HASH, Op.COMMIT, Op.SET_ACCESS]),
    st.integers(1, 4),
    st.sampled_from([1, 1000]),
)


BAD_SLEEPS: list[dict[str, Any]] = [{"level": 3}, {"mode": "now"}, {"policies": {"gold": "host"}}, {"deadline_s": -1.0}]

thens = st.sampled_from(["nothing", "a step", "its end", "its end"])
steps_after = st.integers(0, 5)
ACTIONS = one_of(
    action("add", 4, prompt=prompts, sampling=samplings, transfer=transfers, steps=steps_after),
    action("abort", which=st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    action("leave", which=st.integers(0, 9)),
    action("steps", 2, count=st.integers(1, 8)),
    action("a_step_fails", how=st.sampled_from(["raises", "no token"])),
    action("peers", ignores=st.booleans(), ends=st.booleans()),
    action("sleep", 3, level=st.integers(0, 2), asked=st.none() | policies, mode=modes, deadline_s=deadlines, then=thens),
    action("wake", 3, tags=some_tags, then=thens),
    action("pause", mode=modes, then=thens),
    action("resume"),
    action("release", then=thens),
    action("update", 2, version=st.integers(0, 3), then=thens),
    action("retrain", version=st.integers(1, 3), level=st.integers(1, 2), mode=modes),
    action("a_bad_sleep", bad=st.sampled_from(BAD_SLEEPS)),
    action("transact", 3, fault=driver_faults, fails=st.sampled_from([None, None, None, "reload", "release", "restore"])),
    action("time_passes", seconds=st.sampled_from([1.0, 6.0, 70.0])),
    action("restart"),
)


class EngineMachine(EngineChecks):
    @initialize(
        num_blocks=st.integers(5, 16),
        budget=st.integers(1, 12),
        seats=st.integers(1, 4),
        while_asleep=st.sampled_from(["reject", "wait", "wake"]),
        caching=st.sampled_from([True, True, True, False]),
        connected=st.booleans(),
    )
    def start(self, num_blocks: int, budget: int, seats: int, while_asleep: Any, caching: bool, connected: bool) -> None:
        count_machine()
        config = EngineConfig(
            model=ModelConfig(source="fake"),
            cache=CacheConfig(enable_prefix_caching=caching),
            scheduler=SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget, max_waiting=6),
            sleep=SleepConfig(
                enable_sleep_mode=True,
                while_asleep=while_asleep,
                retry_after_s=RETRY_S,
                default_deadline_s=DEFAULT_DEADLINE_S,
            ),
        )
        self.set_up(config, num_blocks, connected)

    @rule(action=ACTIONS)
    def act(self, action: Action) -> None:
        count_step()
        name, arguments = action
        getattr(self, name)(**arguments)

    # ---- requests ------------------------------------------------------------------------------------------------------------

    def add(self, prompt: list[int], sampling: SamplingParams, transfer: dict[str, Any] | None, steps: int) -> None:
        assert self.client is not None
        self.client.deliver()  # whoever left before
        state, away = self.core.state, self.turns_away()
        name = f"r{next(self.names)}"
        request = GenerationRequest(
            request_id=name, prompt_token_ids=prompt, sampling=sampling, eos_token_ids=EOS_IDS, kv_transfer_params=transfer
        )
        full = self.core.stats().scheduler.waiting >= self.config.scheduler.max_waiting
        stream = self.events.stream(self.client, request)
        stream.while_asleep = away
        stream.versions = ((0, self.worker.version),)
        if away and self.config.sleep.while_asleep == "reject":
            assert isinstance(stream.error, AsleepError), f"{state}: {stream.error!r}"
            assert (stream.error.fields["retry_after_s"], stream.error.fields["state"]) == (RETRY_S, state.value)
        elif len(prompt) >= self.context_len or full:
            assert isinstance(stream.error, TorporError)
            assert isinstance(stream.error, CapacityError) == (len(prompt) < self.context_len)
        else:
            assert stream.error is None, f"{state}: refused with {stream.error!r}"
            self.streams[name] = stream
            self.added += 1
        assert self.core.state is state
        self.steps(steps)

    def abort(self, which: list[int]) -> None:
        present = self.open_names()
        names = [present[index % len(present)] for index in which if present]
        for name in names:
            self.streams[name].may_abort = True
        self.core.abort([*names, "nobody"])

    def leave(self, which: int) -> None:
        names = self.open_names()
        if names:
            self.streams[names[which % len(names)]].leave()
            self.events.pump()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def a_step_fails(self, how: str) -> None:
        """The next one that computes something; not so many in a row that the core ends."""
        if self.core._failed_steps + 1 >= MAX_FAILED_STEPS:
            return
        if how == "raises":
            self.worker.fail_next = DeviceError("told to fail", operation="step")
        else:
            self.worker.fail_samples = True
        self.step()
        self.worker.fail_next, self.worker.fail_samples = None, False

    def peers(self, ignores: bool, ends: bool) -> None:
        """Loads can be cancelled, or cannot; hand-offs are read and loads fail, or do not yet."""
        if not self.connected:
            return
        self.link.ignores_cancels = ignores
        if ends:
            self._end_transfers()

    def _end_transfers(self) -> None:
        queues = self.core.scheduler._queues
        self.link.next_finished = Finished(
            sending=frozenset(queues.handed_off), failed=frozenset([*queues.loading, *queues.cancelling])
        )

    def link_lets_go(self) -> None:
        self.link.ignores_cancels = False
        if self.core.state not in (S.SLEEPING, S.WAKING):
            self._end_transfers()

    # ---- lifecycle -----------------------------------------------------------------------------------------------------------

    def sleep(self, level: int, asked: Mapping[str, str] | None, mode: Any, deadline_s: float | None, then: str) -> None:
        request = SleepRequest(level=level, mode=mode, deadline_s=deadline_s, policies=None if asked is None else dict(asked))
        call = self.called(
            "sleep",
            lambda: self.core.sleep(request),
            policies=policies_of(level, asked),
            level=None if asked is not None else level,
            mode=mode,
            deadline_s=DEFAULT_DEADLINE_S if deadline_s is None else deadline_s,
        )
        self._check_sleep(call)
        self._go_on(call, then)

    def pause(self, mode: Any, then: str) -> None:
        call = self.called("pause", lambda: self.core.pause(mode), mode=mode, level=0)
        self._check_sleep(call)
        self._go_on(call, then)

    def release(self, then: str) -> None:
        discard = {"kv_cache": "discard"}
        call = self.called("release", self.core.release_kv_cache_memory, policies=discard, mode="wait")
        self._check_sleep(call)
        self._go_on(call, then)

    def wake(self, tags: Sequence[str] | None, then: str) -> None:
        before = self.core.state
        sleepers = [c for c in self.calls if c.sleeps and not c.ticket.done()]
        call = self.called("wake", lambda: self.core.wake_up(tags), tags=tags)
        self._check_outcome(call, *state_after_wake(before))
        if before is S.DRAINING:
            for sleeper in sleepers:
                assert isinstance(sleeper.error, SleepAborted)
                assert sleeper.error.fields["reason"] == "woken"
        self._go_on(call, then)

    def resume(self) -> None:
        call = self.called("resume", self.core.resume)
        self._check_outcome(call, *state_after_resume(call.asked_in, call.draining))

    def update(self, version: int, then: str) -> None:
        source = f"fake@{version}" if version else "nowhere"
        call = self.called("update", lambda: self.core.update_weights(source), version=version)
        self._check_outcome(call, *state_after_update(call.asked_in, self.pools))
        self._go_on(call, then)

    def retrain(self, version: int, level: int, mode: Any) -> None:
        """As a trainer does it: otherwise few updates find an engine that is asleep and has no KV."""
        self.sleep(level, None, mode, None, "its end")
        self.update(version, "its end")
        self.wake(None, "its end")

    def a_bad_sleep(self, bad: dict[str, Any]) -> None:
        state = self.core.state
        error = self.core.sleep(SleepRequest(**bad)).exception(0)
        assert isinstance(error, ValueError), error
        assert self.core.state is state

    def transact(self, fault: tuple[Op, int, int] | None, fails: str | None) -> None:
        """The memory transaction runs; the loop takes note in its next step."""
        if not self.background.pending:
            return
        self.faulty |= fault is not None or fails is not None
        with contextlib.ExitStack() as during:
            if fault is not None:
                during.enter_context(Fault(self.worker.device, *fault))
            self._let_fail(fails)
            self.background.run()
        self._let_fail(None)

    def _let_fail(self, what: str | None) -> None:
        self.worker.fail_reload = DeviceError("told to fail", operation="reload") if what == "reload" else None
        if self.connected:
            error = TransportError("told to fail", transport="fake")
            self.link.fail_release = error if what == "release" else None
            self.link.fail_restore = error if what == "restore" else None

    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def restart(self) -> None:
        self.shut_down()
        self.boot()

    def _go_on(self, call: Call, then: str) -> None:
        """To the call's end, as far as requests and peers allow."""
        for _ in range({"nothing": 0, "a step": 1}.get(then, STEPS_TO_AN_END)):
            if call.ticket.done():
                return
            self.background.run()
            self.step()

    # ---- calls ---------------------------------------------------------------------------------------------------------------

    def _check_sleep(self, call: Call) -> None:
        self._check_outcome(call, *state_after_sleep(call.asked_in, call, call.draining))

    def _check_outcome(self, call: Call, state: EngineState, outcome: str) -> None:
        assert self.core.state is state, f"{call.what} in {call.asked_in}: {self.core.state}, not {state}"
        match outcome:
            case "begins" | "joins" | "waits":
                assert not call.ticket.done()
            case "refused":
                assert isinstance(call.error, StateError), call.error
                assert call.error.fields["state"] == state.value
            case _:
                assert call.report["noop"] is (outcome == "nothing to do"), call.report
                assert (call.report["reason"] is not None) == (outcome in ("nothing to do", "resumed"))
                assert call.report["state"] == state.value
