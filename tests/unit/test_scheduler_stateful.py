"""Everything at once, in any order (E6, P5): adds, aborts, steps, preemptions, loads that arrive, fail, are late or are
cancelled, hand-offs, freezes, resets with the same and with other weights.

After every step ``check_integrity`` holds, the fake runner has seen the right KV under every position it built upon, and each
token is what the model says of all tokens before it.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_fakes import Engine, next_token

from torpor.request import EngineOutput, FinishReason
from torpor.scheduler import RequestState
from torpor.testing.clock import FakeClock

# Few texts, so that prompts share blocks; lengths around the ends of blocks. The second kind has equal blocks after unlike ones.
prompts = st.one_of(
    st.builds(lambda length, tail: [*range(length), *tail], st.integers(1, 13), st.lists(st.integers(90, 91), max_size=2)),
    st.builds(lambda first, length: [first] * 4 + [7] * length, st.integers(0, 1), st.integers(1, 9)),
)


class CheckedEngine(Engine):
    """Every new token must follow from the tokens before it and the weights of the moment."""

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            for token in output.new_token_ids:
                before = [*self.prompts[output.request_id], *self.text.get(output.request_id, [])]
                assert token == next_token(self.kv.weights, before), output
        super().take(outputs)

    prompts: dict[str, list[int]]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 14),
        budget=st.integers(1, 12),
        seats=st.integers(1, 5),
        caching=st.sampled_from([True, True, True, False]),
        max_model_len=st.sampled_from([19, 24, 100]),
    )
    def start(self, num_blocks, budget, seats, caching, max_model_len):
        self.clock = FakeClock()
        self.engine = CheckedEngine(
            num_blocks=num_blocks,
            caching=caching,
            max_model_len=max_model_len,
            connector=True,
            clock=self.clock,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            remote_kv_timeout_s=5.0,
        )
        self.engine.prompts = {}
        self.weights_version = 0

    @property
    def scheduler(self):
        return self.engine.scheduler

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 12),
        held=st.sampled_from([0, 0, 3, 8, 100]),
        sync=st.booleans(),
        fails=st.booleans(),
        hand_off=st.booleans(),
    )
    def add(self, prompt, max_tokens, held, sync, fails, hand_off):
        name = f"r{len(self.engine.prompts)}"
        self.engine.prompts[name] = prompt
        if sync and fails:
            self.engine.connector.fail_sync.add(name)
        params = {"remote_tokens": min(held, len(prompt)), "sync": sync, "do_remote_decode": hand_off}
        self.engine.add(name, prompt, max_tokens=max_tokens, params=params)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.engine.step()

    @rule(data=st.data())
    def abort(self, data):
        if self.engine.prompts:
            names = data.draw(st.lists(st.sampled_from(sorted(self.engine.prompts)), max_size=3))
            self.engine.take(self.scheduler.abort(names))

    @rule(data=st.data())
    def abort_between_a_step_and_its_result(self, data):
        output = self.scheduler.schedule()
        if output is not None:
            result = self.engine.execute(output)
            names = data.draw(st.lists(st.sampled_from(sorted(self.engine.prompts)), max_size=2))
            self.engine.take(self.scheduler.abort(names))
            self.engine.take(self.scheduler.update(output, result))

    @rule(executed=st.booleans())
    def a_result_is_lost(self, executed):
        output = self.scheduler.schedule()
        if output is not None and executed:
            result = self.engine.execute(output)
            self.engine.connector.failed |= result.failed_recving & self.scheduler._queues.loading.keys()
            self.engine.connector.failed |= result.failed_recving & self.scheduler._queues.cancelling.keys()
            self.engine.connector.recving |= result.finished_recving
            self.engine.connector.sending |= result.finished_sending
        elif output is not None:
            self.engine.connector.sync_loads.clear()

    def _some_load(self, data):
        loads = sorted(self.engine.connector.loads)
        return data.draw(st.sampled_from(loads)) if loads else None

    @rule(data=st.data(), arrives=st.booleans())
    def a_load_ends(self, data, arrives):
        name = self._some_load(data)
        if name and arrives:
            self.engine.connector.complete(name, self.engine.kv)
        elif name:
            self.engine.connector.fail(name)

    @rule()
    def a_hand_off_is_read(self):
        for name in sorted(self.engine.connector.hand_offs)[:1]:
            self.engine.connector.read(name, self.engine.kv)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule(is_open=st.booleans())
    def admission(self, is_open):
        if is_open:
            self.scheduler.open_admission()
        else:
            self.scheduler.close_admission()

    @rule()
    def cancel_loads(self):
        self.scheduler.cancel_loads()

    @precondition(lambda self: not self.scheduler.has_loading)
    @rule()
    def freeze(self):
        order = [*self.scheduler.running_ids(), *self.scheduler.waiting_ids()]
        self.scheduler.freeze()
        assert self.scheduler.waiting_ids() == order

    @precondition(lambda self: not self.scheduler.has_loading)
    @rule(new_weights=st.booleans())
    def sleep_and_wake(self, new_weights):
        self.scheduler.freeze()
        self._end_hand_offs()
        self.weights_version += new_weights
        version = f"w{self.weights_version}"
        self.engine.manager.reset(version)
        self.engine.kv.weights = version
        self.engine.kv.clear()

    def _end_hand_offs(self):
        for name in self.scheduler.end_hand_offs():
            self.engine.connector.hand_offs.pop(name, None)

    @invariant()
    def everything_agrees(self):
        if hasattr(self, "engine"):
            self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.scheduler.open_admission()
        for _ in range(3000):
            for name in list(self.engine.connector.loads):
                self.engine.connector.complete(name, self.engine.kv)
            for name in list(self.engine.connector.hand_offs):
                self.engine.connector.read(name, self.engine.kv)
            output = self.engine.step()
            if output is None:
                break
        self._everybody_was_answered()

    def _everybody_was_answered(self):
        assert self.engine.last.keys() == self.engine.prompts.keys()
        for name, output in self.engine.last.items():
            said = len(self.engine.text.get(name, []))
            assert output.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
            assert output.finish_reason is FinishReason.ABORT or said >= 1
            assert self.scheduler.state_of(name) is RequestState.FINISHED
            assert len(self.engine.connector.told[name]) == 1
        assert self.engine.manager.stats().free_blocks == self.engine.manager.num_blocks


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestSchedulerMachine = SchedulerMachine.TestCase
