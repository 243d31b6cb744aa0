"""P1-P5 in any order: hand-offs read at once, late, twice, never, under old epochs and with forged parameters, while both ends
sleep, wake, pause, release, abort, restart and crash, connections break, and messages are late. Real pools, real connectors; an
answer is always that of the reference."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

from actions import Action, action, one_of
from engine_machine import deadlines, modes, policies, prompts, samplings, some_tags
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pair_base import HandedOff
from pair_connectors import CONNECTORS, Lateness
from pair_moves import PairMoves
from pair_requests import FORGERIES, PairRequests
from pair_sides import LEASE_S, Side
from step_counter import count_machine, count_step

from torpor._native import Op
from torpor.engine.tickets import Ticket
from torpor.errors import SleepAborted, StateError
from torpor.testing.clock import FakeClock

driver_faults = st.sampled_from([None] * 5) | st.tuples(
    st.sampled_from([Op.CREATE, Op.MAP, Op.UNMAP, Op.EXPORT, Op.COPY]), st.integers(1, 3), st.sampled_from([1, 1000])
)
sides = st.sampled_from(["P", "D"])
versions = st.integers(1, 2)
forgeries = st.sampled_from([*[None] * len(FORGERIES), *FORGERIES])

ACTIONS = one_of(
    action("prefill", 4, prompt=prompts, again=st.booleans(), waits=st.sampled_from([True, True, False])),
    action("read_now", 6, which=st.integers(0, 3), forgery=forgeries),
    action("read", 2, which=st.integers(0, 6), forgery=forgeries, sampling=samplings),
    action("ask", prompt=prompts, sampling=samplings, who=sides),
    action("abort", which=st.lists(st.integers(0, 9), min_size=1, max_size=3), who=sides),
    action("steps", 2, who=sides, count=st.integers(1, 8)),
    action("reads_are_slow", slow=st.booleans()),
    action("time_passes", seconds=st.sampled_from([1.0, 12.0, LEASE_S + 1])),
    action("sleep", who=sides, level=st.integers(0, 2), asked=st.none() | policies, mode=modes, deadline_s=deadlines),
    action("fall_asleep", 2, who=sides, level=st.integers(1, 2), mode=modes),
    action("wake_whole", 3, who=sides),
    action("nap", 3, who=sides, level=st.integers(1, 2), mode=modes),
    action("wake", who=sides, tags=some_tags),
    action("pause", who=sides, mode=modes),
    action("resume", who=sides),
    action("release", who=sides),
    action("update", who=sides, version=versions),
    action("retrain", who=sides, version=versions, level=st.integers(1, 2), mode=modes),
    action("agree", 2, leader=sides),
    action("transact", 2, who=sides, fault=driver_faults),
    action("restart", who=sides),
    action("crash", who=sides),
    action("cut"),
    action("messages_are_late", late=st.booleans()),
)


class PairMachine(PairRequests, PairMoves, RuleBasedStateMachine):
    @initialize(p_blocks=st.integers(6, 14), d_blocks=st.integers(6, 14), budget=st.sampled_from([3, 8, 16]))
    def start(self, p_blocks: int, d_blocks: int, budget: int) -> None:
        count_machine()
        self.folder = Path(tempfile.mkdtemp(prefix="torpor-pair-"))
        # Nobody else can hold memory of ours; looking into every process of the machine takes half of the time.
        self.only_us = mock.patch("torpor.memory.holders.processes", return_value=[os.getpid()])
        self.only_us.start()
        self.lateness = Lateness()
        self.during = contextlib.ExitStack()
        self.during.enter_context(self.lateness.installed())
        self.clock = FakeClock()
        self.hand_offs: list[HandedOff] = []
        self.names = itertools.count()
        self.sides: dict[str, Side] = {}
        self.sides["P"] = Side(self.connector, "producer", self.folder, self.clock, p_blocks, budget, self._handed_off)
        self.sides["D"] = Side(self.connector, "consumer", self.folder, self.clock, d_blocks, budget, self._handed_off)

    @rule(action=ACTIONS)
    def act(self, action: Action) -> None:
        count_step()
        name, arguments = action
        getattr(self, name)(**arguments)

    @invariant()
    def both_agree_with_themselves(self) -> None:
        if hasattr(self, "sides") and len(self.sides) == 2:
            self._look_at_epochs()
            self.p.check()
            self.d.check()
            for side in (self.p, self.d):
                for ticket in side.tickets:
                    self._check_call(side, ticket)

    def _check_call(self, side: Side, ticket: Ticket) -> None:
        if not ticket.done():
            return
        error = ticket.exception(0)
        if error is None:
            report = ticket.result(0)
            theirs = side is self.d and CONNECTORS[self.connector].pins
            assert theirs or report.get("returned_bytes") == report.get("unmapped_bytes"), f"{side.name}: {report} (P4a)"
        elif not side.faulty:
            assert isinstance(error, StateError), repr(error)
            assert not isinstance(error, SleepAborted) or error.fields["reason"] != "hook", repr(error)

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        try:
            if sys.exc_info()[0] is None and len(self.sides) == 2:
                self._go_home()
                for side in self.sides.values():
                    side.shut_down()
        finally:
            for side in self.sides.values():
                with contextlib.suppress(AssertionError):  # what failed first is what is told
                    side.shut_down()
            self.during.close()
            self.only_us.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _go_home(self) -> None:
        """Whatever happened: both wake, everybody is answered, nothing stays held, and the pair works."""
        self.reads_are_slow(False)
        self.messages_are_late(False)
        for side in (self.p, self.d):
            self.wake_whole(side.name)
            side.until(lambda side=side: side.awake and side.at_rest(), "rest", others=self._end_leases_in_the_way)
        self.p.step()
        self.clock.advance(LEASE_S + 1)
        self.p.until(lambda: not self.p.core.scheduler.has_hand_offs, "the end of every lease")
        self.both_agree_with_themselves()
        for side in (self.p, self.d):
            stats = side.core.stats()
            assert stats.cache.free_blocks == stats.cache.num_blocks, f"{side.name}: blocks leak"
            assert stats.connector is not None
            assert (stats.connector.pending_hand_offs, stats.connector.loads_in_flight) == (0, 0), stats.connector
        self.agree("P")
        self.hand_offs.clear()
        self.prefill([91] * 9, False, True)
        self.read_now(0, None)
        assert self.d.core.stats().scheduler.loads_done > 0


PAIRS: dict[str, type[PairMachine]] = {
    name: type(f"{name.capitalize()}Pair", (PairMachine,), {"connector": name}) for name in CONNECTORS
}
