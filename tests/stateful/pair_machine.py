"""P1-P5 in any order: hand-offs read at once, late, twice, never, under old epochs and with forged parameters, while both ends
sleep, wake, pause, release, abort, restart and crash, connections break, and messages are late. Real pools, real connectors; an
answer is always that of the reference."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from actions import Action, action, one_of
from engine_machine import deadlines, modes, policies, prompts, samplings, some_tags
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pair_connectors import CONNECTORS, Lateness, cut, links, live_links, parts_of, same, whole
from pair_sides import HAND_OFF, LEASE_S, POLL_S, WAIT_S, Asked, Side
from step_counter import count, count_machine, count_step

from torpor._native import Op
from torpor.connectors.link import Link
from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.tickets import Ticket
from torpor.errors import AsleepError, RequestError, SleepAborted, StateError
from torpor.kvcache.prefix import HashChain
from torpor.request import SamplingParams
from torpor.testing.clock import FakeClock
from torpor.testing.driver import Fault

S = EngineState
driver_faults = st.sampled_from([None] * 5) | st.tuples(
    st.sampled_from([Op.CREATE, Op.MAP, Op.UNMAP, Op.EXPORT, Op.COPY]), st.integers(1, 3), st.sampled_from([1, 1000])
)
SLOW_COPY_S = 0.02
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
SOME = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)

sides = st.sampled_from(["P", "D"])
FORGERIES = ["epoch", "next epoch", "now", "lease", "blocks", "order", "request", "tokens", "engine", "prompt"]
forgeries = st.sampled_from([*[None] * len(FORGERIES), *FORGERIES])


@dataclass
class HandedOff:
    prompt: list[int]
    params: dict[str, Any]
    epoch: str
    alive: bool | None = True  # None: nobody can say


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
    action("transact", 2, who=sides, fault=driver_faults),
    action("restart", who=sides),
    action("crash", who=sides),
    action("cut"),
    action("messages_are_late", late=st.booleans()),
)


class PairMachine(RuleBasedStateMachine):
    connector: ClassVar[str] = "ipc"

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

    @property
    def p(self) -> Side:
        return self.sides["P"]

    @property
    def d(self) -> Side:
        return self.sides["D"]

    # ---- requests ------------------------------------------------------------------------------------------------------------

    def prefill(self, prompt: list[int], again: bool, waits: bool) -> None:
        """``again``: under a name that was used before, as a client that retries does."""
        name = "again" if again and "again" not in self.p.open() else f"p{next(self.names)}"
        try:
            asked = self.p.add(name, prompt, ONE, dict(HAND_OFF))
        except (AsleepError, RequestError) as error:
            self._check_refusal(self.p, error, name)
            return
        if waits and self.p.awake:
            self.p.until(lambda: asked.end is not None or not self.p.awake or self.p.waits_for_readers(), "a prefill")

    def _handed_off(self, asked: Asked) -> None:
        assert asked.end is not None
        assert asked.end.kv_transfer_params is not None
        params = asked.end.kv_transfer_params
        self.hand_offs.append(HandedOff(list(asked.prompt), params, params["torpor"]["epoch"]))

    def read(self, which: int, forgery: str | None, sampling: SamplingParams) -> None:
        """Asks, and does not wait."""
        if not self.hand_offs:
            return
        hand_off = self._hand_off(which)
        prompt, params = self._forged(hand_off, forgery)
        name = f"d{next(self.names)}"
        try:
            self.d.add(name, prompt, sampling, params)
        except (AsleepError, RequestError) as error:
            self._check_refusal(self.d, error, name)
            return
        hand_off.alive = None if hand_off.alive else hand_off.alive
        self.d.step()

    def read_now(self, which: int, forgery: str | None) -> None:
        """Reads and waits, with nobody else there: then it is known what must come of it."""
        if not self.hand_offs:
            return
        self.wake_whole("D")
        self.d.until(self.d.at_rest, "the end of everything else")
        self.p.step(2)
        self.p.until(lambda: not self.p.in_transaction, "the end of a transaction")
        self._look_at_epochs()
        hand_off = self._hand_off(which)
        prompt, params = self._forged(hand_off, forgery)
        remote = int(params["remote_num_tokens"])
        sequence_hit = self._local_hit(prompt)
        wanted = min(remote, len(prompt) - 1) > sequence_hit
        must = None if hand_off.alive is None else hand_off.alive and same(params, hand_off.params) and prompt == hand_off.prompt
        before = self._loads()
        try:
            asked = self.d.add(f"d{next(self.names)}", prompt, SOME, params)
        except RequestError:
            assert forgery is not None
            return
        self.d.until(lambda: asked.end is not None, "an answer", others=self.p.step)
        done, failed, received = (now - then for now, then in zip(self._loads(), before, strict=True))
        count(f"read {'as it is' if forgery is None else 'forged'} > {'done' if done else 'lost' if failed else 'not wanted'}")
        assert done + failed == int(wanted), f"{forgery}: {done} loads done, {failed} failed, {wanted} wanted"
        assert asked.end is not None
        if wanted and must is not None:
            assert done == int(must), f"{forgery}, {hand_off}: the load was {'done' if done else 'lost'}"
        if failed:
            assert received == 0, "a late read yields bytes (P4)"
            assert asked.end.num_cached_tokens <= sequence_hit
        if done:
            assert asked.end.num_cached_tokens == min(remote, len(prompt) - 1)
        if same(params, hand_off.params) and prompt == hand_off.prompt and hand_off.alive:
            self._wait_until_let_go(hand_off)

    def _wait_until_let_go(self, hand_off: HandedOff) -> None:
        """P hears that it was read (or that nobody needs it), and its blocks are free."""
        hand_off.alive = False
        leases = self.p.lease_tables()[0]
        number = hand_off.params["torpor"]["lease"]
        if self._told(hand_off):
            self.p.until(lambda: number not in leases._leases, "the end of a lease that was read")

    def _told(self, hand_off: HandedOff) -> bool:
        """Only over a link of that epoch does D tell P."""
        if any(str(epoch) == hand_off.epoch for epoch in links(self.d.worker.connector)):
            return True
        hand_off.alive = None
        return False

    def ask(self, prompt: list[int], sampling: SamplingParams, who: str) -> None:
        """A request of its own, without a transfer."""
        side, name = self.sides[who], f"a{next(self.names)}"
        try:
            side.add(name, prompt, sampling, None)
        except (AsleepError, RequestError) as error:
            self._check_refusal(side, error, name)

    def abort(self, which: list[int], who: str) -> None:
        names = self.sides[who].open()
        self.sides[who].abort(sorted({names[index % len(names)] for index in which if names}))

    def steps(self, who: str, count: int) -> None:
        for _ in range(count):
            self.sides[who].step()

    def reads_are_slow(self, slow: bool) -> None:
        device = self.d.worker.device
        device.__dict__.pop("copy_blocks", None)
        if not slow:
            return
        plain = device.copy_blocks

        def slowly(*args: Any) -> Any:
            time.sleep(SLOW_COPY_S)
            return plain(*args)

        device.copy_blocks = slowly  # type: ignore[method-assign]

    def time_passes(self, seconds: float) -> None:
        """Leases end, loads are late."""
        if not self.p.in_transaction:
            self.p.step()
        granted = list(self.hand_offs)  # by the next step at the latest; one that ends in that step has its whole lease before it
        if not self.p.in_transaction:
            self.p.step()
        self.clock.advance(seconds)
        for hand_off in self.hand_offs:
            hand_off.alive = None if hand_off.alive else hand_off.alive
        if not self.p.in_transaction:
            self.p.step()
            if seconds > LEASE_S:
                for hand_off in granted:
                    hand_off.alive = False

    # ---- lifecycle -----------------------------------------------------------------------------------------------------------

    def sleep(self, who: str, level: int, asked: Mapping[str, str] | None, mode: Any, deadline_s: float | None) -> None:
        self._call(
            who,
            lambda core: core.sleep(
                SleepRequest(level=level, policies=None if asked is None else dict(asked), mode=mode, deadline_s=deadline_s)
            ),
            aborts=mode == "abort",
        )

    def fall_asleep(self, who: str, level: int, mode: Any) -> None:
        """A whole sleep, of an engine that is awake."""
        side = self.sides[who]
        if side.awake:
            request = SleepRequest(level=level, mode=mode, deadline_s=1e6)
            self._call(who, lambda core: core.sleep(request), aborts=mode == "abort")
            side.until(lambda: side.state is S.ASLEEP, "a sleep", others=self._end_leases_in_the_way)
            count(f"{who} sleeps")

    def wake_whole(self, who: str) -> None:
        """From wherever it is."""
        side = self.sides[who]
        side.until(lambda: not side.in_transaction, "the end of a transaction")
        if side.awake:
            return
        slept = side.state is S.ASLEEP
        self._call(who, lambda core: core.wake_up())
        side.until(lambda: side.awake, "a wake")
        count(f"{who} wakes" if slept else f"{who} goes on")

    def nap(self, who: str, level: int, mode: Any) -> None:
        self.wake_whole(who)
        self.fall_asleep(who, level, mode)
        self.wake_whole(who)

    def wake(self, who: str, tags: Sequence[str] | None) -> None:
        self._call(who, lambda core: core.wake_up(tags))

    def pause(self, who: str, mode: Any) -> None:
        self._call(who, lambda core: core.pause(mode), aborts=mode == "abort")

    def resume(self, who: str) -> None:
        self._call(who, lambda core: core.resume())

    def release(self, who: str) -> None:
        self._call(who, lambda core: core.release_kv_cache_memory())

    def transact(self, who: str, fault: tuple[Op, int, int] | None) -> None:
        side = self.sides[who]
        with contextlib.ExitStack() as during:
            if fault is not None and side.background.pending:
                side.faulty = True
                during.enter_context(Fault(side.worker.device, *fault))
            side.background.run()
        side.step()
        self._look_at_epochs()

    def restart(self, who: str) -> None:
        self.sides[who].restart()
        self._look_at_epochs()

    def crash(self, who: str) -> None:
        had = live_links(self.d.worker.connector) if who == "P" else []
        self.sides[who].crash()
        self._are_gone(had)
        self._look_at_epochs()
        count(f"{who} crashes")

    def cut(self) -> None:
        """Both live on, and have lost each other. A hand-off that D was about to speak of may be over, or not."""
        if self.hand_offs and not links(self.d.worker.connector):
            self.read_now(0, None)
        had = live_links(self.d.worker.connector)
        cut(self.p.worker.connector)
        self._are_gone(had)
        count("cut" if had else "cut without a link")

    def _are_gone(self, had: list[Link]) -> None:
        """Those: a load that nobody waited for may have made another one meanwhile."""
        deadline = time.monotonic() + WAIT_S
        while any(link.alive for link in had):
            assert time.monotonic() < deadline, "D does not see that its connection is lost"
            time.sleep(POLL_S)

    def messages_are_late(self, late: bool) -> None:
        self.lateness.on = late

    def _call(self, who: str, call: Any, *, aborts: bool = False) -> None:
        side = self.sides[who]
        open_before = side.open()
        if aborts:
            for name in open_before:
                side.asked[name].may_abort = True
        ticket = call(side.core)
        side.tickets.append(ticket)
        self._look_at_epochs()

    # ---- helpers -------------------------------------------------------------------------------------------------------------

    def _hand_off(self, which: int) -> HandedOff:
        """Newer ones more often."""
        return self.hand_offs[-1 - which % len(self.hand_offs)]

    def _loads(self) -> tuple[int, int, int]:
        stats = self.d.core.stats()
        assert stats.connector is not None
        return stats.scheduler.loads_done, stats.scheduler.loads_failed, stats.connector.bytes_received

    def _local_hit(self, prompt: list[int]) -> int:
        return self.d.core.scheduler.kv.find_prefix(prompt, HashChain()).num_tokens

    def _forged(self, hand_off: HandedOff, forgery: str | None) -> tuple[list[int], dict[str, Any]]:
        prompt, params = list(hand_off.prompt), copy.deepcopy(hand_off.params)
        if forgery == "prompt":
            prompt[0] += 1
        for part in parts_of(params):
            self._forge(part, forgery)
        return prompt, whole(params)

    def _forge(self, params: dict[str, Any], forgery: str | None) -> None:
        told, blocks = params["torpor"], params["remote_block_ids"]
        boot, counter = told["epoch"].split(".")
        match forgery:
            case "epoch":
                told["epoch"] = f"{'0' * 16}.{counter}"
            case "next epoch":
                told["epoch"] = f"{boot}.{int(counter) + 1}"
            case "now":
                told["epoch"] = self.p.epoch or told["epoch"]
            case "lease":
                told["lease"] += 1
            case "blocks":
                params["remote_block_ids"] = [(block + 1) % self.p.num_blocks for block in blocks]
            case "order":
                params["remote_block_ids"] = blocks[::-1]
            case "request":
                params["remote_request_id"] += "x"
            case "tokens":
                params["remote_num_tokens"] = max(1, params["remote_num_tokens"] - 1)
                params["remote_block_ids"] = blocks[: -(-params["remote_num_tokens"] // 4)]
            case "engine":
                params["remote_engine_id"] = "Q"

    def _end_leases_in_the_way(self) -> None:
        """P's requests wait for blocks that hand-offs have, and nobody reads those now."""
        if self.p.waits_for_readers():
            self.clock.advance(LEASE_S + 1)
            for hand_off in self.hand_offs:
                hand_off.alive = None if hand_off.alive else hand_off.alive

    def _look_at_epochs(self) -> None:
        for hand_off in self.hand_offs:
            if hand_off.epoch != self.p.epoch:
                hand_off.alive = False

    def _check_refusal(self, side: Side, error: Exception, name: str) -> None:
        if isinstance(error, AsleepError):
            assert side.state in (S.DRAINING, S.SLEEPING, S.ASLEEP, S.WAKING), side.state
        else:
            in_use = name in side.core.scheduler._queues.by_id
            assert in_use or "prompt" in str(error) or "kv_transfer_params" in str(error), error

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
        finally:
            for side in self.sides.values():
                with contextlib.suppress(AssertionError):
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
        self.hand_offs.clear()
        self.prefill([91] * 9, False, True)
        self.read_now(0, None)
        assert self.d.core.stats().scheduler.loads_done > 0


PAIRS: dict[str, type[PairMachine]] = {
    name: type(f"{name.capitalize()}Pair", (PairMachine,), {"connector": name}) for name in CONNECTORS
}
