"""One engine of a pair: a stepped core over a ``CheckedWorker`` with a real connector, whose threads go on by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checked_worker import EOS_IDS, FIRST, CheckedWorker, Versions, reference
from pair_connectors import CONNECTORS, cut, placed, pull_workers

from torpor.connectors import ConnectorConfig
from torpor.connectors.leases import LeaseTable
from torpor.engine.base import EngineState
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.engine.executor import UniprocExecutor
from torpor.engine.kv_connector import choose_connector
from torpor.engine.startup import bring_up
from torpor.engine.tickets import Ticket
from torpor.models.config import ModelConfig
from torpor.request import EngineOutput, FinishReason, GenerationRequest, SamplingParams
from torpor.scheduler.config import SchedulerConfig
from torpor.testing.clock import FakeClock
from torpor.testing.engine import ManualBackground, fake_model

MAX_MODEL_LEN = 40
LEASE_S = 30.0
WITHDRAW_S = 10.0
WAIT_S = 30.0  # for threads of the connectors, on a busy machine
POLL_S = 0.0005
HAND_OFF = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Asked:
    """A request, and what was answered."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    versions: Versions = FIRST
    tokens: list[int] = field(default_factory=list)
    end: EngineOutput | None = None
    may_abort: bool = False
    hands_off: bool = False

    def check(self, context_len: int, broken: bool) -> None:
        text, reason = reference(self.prompt, self.sampling, context_len, self.versions)
        said = tuple(self.tokens)
        assert said == text[: len(said)], f"{self.prompt}: said {said}, the reference says {text} (P5)"
        if self.end is None:
            return
        match self.end.finish_reason:
            case FinishReason.ABORT:
                assert self.may_abort, f"{self.prompt} was aborted by nobody"
            case FinishReason.ERROR:
                assert broken, self.end
            case other:
                assert (said, other) == (text, reason)


class Side:
    def __init__(
        self,
        connector: str,
        role: Any,
        folder: Path,
        clock: FakeClock,
        num_blocks: int,
        budget: int,
        handed_off: Callable[[Asked], None],
    ) -> None:
        engine_id = {"producer": "P", "consumer": "D"}[role]
        asked = CONNECTORS[connector]
        self.name = engine_id
        self.connector = ConnectorConfig(
            connector=asked.path,
            role=role,
            engine_id=engine_id,
            withdraw_timeout_s=WITHDRAW_S,
            lease_heartbeat_s=1.0,
            handoff_lease_s=LEASE_S,
            extra=placed(asked.extra, str(folder)),
        )
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, handoff_lease_s=LEASE_S)
        self.config = EngineConfig(
            model=ModelConfig(source="fake"), scheduler=scheduler, sleep=SleepConfig(enable_sleep_mode=True)
        )
        self.clock = clock
        self.num_blocks = num_blocks
        self.context_len = min(MAX_MODEL_LEN, num_blocks * 4)
        self.asked: dict[str, Asked] = {}
        self.past: list[Asked] = []
        self._handed_off = handed_off
        self.boot()

    # ---- life ----------------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        self.background = ManualBackground()
        self.worker = CheckedWorker(num_blocks=self.num_blocks, exportable=True)
        self.tickets: list[Ticket] = []
        self.faulty = False  # its driver was told to fail
        self.core = bring_up(
            self.config,
            fake_model(MAX_MODEL_LEN),
            UniprocExecutor(self.worker),
            choose_connector(self.connector, self.config.sleep),
            background=self.background,
            clock=self.clock,
        )
        assert pull_workers(self.worker.connector)
        for table in self.lease_tables():
            table._clock = self.clock

    def lease_tables(self) -> list[LeaseTable]:
        return [worker._leases for worker in pull_workers(self.worker.connector) if worker._leases is not None]

    def crash(self) -> None:
        """Peers lose it without a word, and it begins anew."""
        cut(self.worker.connector)
        self.restart()

    def restart(self) -> None:
        self.shut_down()
        for asked in self.asked.values():
            asked.may_abort = True
        self.past += self.asked.values()
        self.asked = {}
        self.boot()

    def shut_down(self) -> None:
        self.background.run()
        self.core.shutdown()
        assert all(ticket.done() for ticket in self.tickets), "a call hangs"

    # ---- how it is -----------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self.core.state

    @property
    def awake(self) -> bool:
        return self.state is EngineState.AWAKE

    @property
    def in_transaction(self) -> bool:
        return self.state in (EngineState.SLEEPING, EngineState.WAKING)

    @property
    def epoch(self) -> str | None:
        assert self.worker.connector is not None
        epoch = self.worker.connector.epoch()
        return None if epoch is None else str(epoch)

    def open(self) -> list[str]:
        return sorted(name for name, asked in self.asked.items() if asked.end is None)

    def at_rest(self) -> bool:
        return not self.open() and not self.core.scheduler.has_loading and not self.in_transaction

    def waits_for_readers(self) -> bool:
        """Hand-offs have the blocks that the next request needs."""
        stats = self.core.stats().scheduler
        return stats.handed_off > 0 and stats.running == 0 and stats.preempted + stats.waiting > 0

    # ---- requests ------------------------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], sampling: SamplingParams, params: dict[str, Any] | None) -> Asked:
        """What ``core.add`` raises; then it is as if nothing was asked."""
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            eos_token_ids=EOS_IDS,
            kv_transfer_params=params,
        )
        self.core.add(request)
        if name in self.asked:
            self.past.append(self.asked[name])
        self.asked[name] = Asked(tuple(prompt), sampling, ((0, self.worker.version),))
        return self.asked[name]

    def update_weights(self, version: int) -> Ticket:
        """Whoever is not answered yet goes on with the new ones."""

        def ended(ticket: Ticket) -> None:
            if ticket.exception(0) is None:
                self.worker.version = version
                for name in self.open():
                    self.asked[name].versions += ((len(self.asked[name].tokens), version),)

        ticket = self.core.update_weights(f"fake@{version}")
        ticket.add_done_callback(ended)
        return ticket

    def abort(self, names: list[str]) -> None:
        for name in names:
            self.asked[name].may_abort = True
        self.core.abort(names)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.core.step():
                asked = self.asked[output.request_id]
                asked.tokens += output.new_token_ids
                if output.finish_reason is not None:
                    assert asked.end is None, "a request ended twice"
                    asked.end = output
                    if output.kv_transfer_params is not None:
                        self._handed_off(asked)

    def until(self, done: Callable[[], bool], what: str, *, others: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            self.background.run()
            self.step()
            others()
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name}: {what} does not happen: {self.state}, {self.core.stats().scheduler}")
            if self.core.wait_s() != 0.0:
                time.sleep(POLL_S)

    # ---- looking -------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self.worker.wrong, self.worker.wrong
        self.core.scheduler.check_integrity()
        if not self.in_transaction:
            self.worker.memory.check_integrity()
            assert self.core.stats().model_id == f"fake@{self.worker.version}"
        for asked in (*self.past, *self.asked.values()):
            asked.check(self.context_len, broken=False)
        stats = self.core.stats()
        if self.state in (EngineState.AWAKE, EngineState.PAUSED):
            assert stats.missing_tags == ()
            assert stats.connector is not None
            assert stats.connector.epoch is not None
        counted, seen = stats.scheduler, stats.connector
        assert seen is not None
        assert counted.loads_done <= seen.loads_done, "a load counts as done that did not arrive"
        self._check_leases()
        live = counted.waiting + counted.running + counted.preempted + counted.loading
        assert live <= len(self.open())

    def _check_leases(self) -> None:
        """Whoever may be read still has its blocks."""
        if self.in_transaction:
            return
        kept = self.core.scheduler._queues.handed_off
        for lease in [lease for table in self.lease_tables() for lease in list(table._leases.values())]:
            assert lease.request_id in kept, f"{lease.request_id} may be read, and its blocks are free"
