"""What becomes of the engines: sleeps, wakes, crashes, connections that break."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pair_base import PairBase, S
from pair_connectors import Lateness, cut, links, live_links
from pair_sides import POLL_S, WAIT_S
from step_counter import count

from torpor._native import Op
from torpor.connectors.link import Link
from torpor.engine.base import SleepRequest
from torpor.testing.driver import Fault


class PairMoves(PairBase):
    lateness: Lateness

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

    def update(self, who: str, version: int) -> None:
        self._call(who, lambda core: self.sides[who].update_weights(version))

    def retrain(self, who: str, version: int, level: int, mode: Any) -> None:
        """As a trainer does it, of one of the two: what the other has is of other weights then."""
        self.wake_whole(who)
        self.fall_asleep(who, level, mode)
        side = self.sides[who]
        updated = side.update_weights(version)
        side.until(updated.done, "an update")
        assert updated.result(0)["model_id"] == f"fake@{version}"
        self.wake_whole(who)
        count(f"{who} is retrained")

    def agree(self, leader: str) -> None:
        """Of the same weights again."""
        follower = {"P": "D", "D": "P"}[leader]
        version = self.sides[leader].worker.version
        if self.sides[follower].worker.version != version:
            self.retrain(follower, version, 2, "wait")

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
