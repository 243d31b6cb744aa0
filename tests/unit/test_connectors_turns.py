"""Several reads of a peer at once (P2, P5): nobody waits for another's turn, and no surprise ends the thread that has to end
them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_pairs import WAIT_S, A, B, Background
from test_connectors_begun import HERE, NAMES, THERE, Sky, all_at_once, idle, meeting, puller_of
from test_connectors_puller import Bench, raises

from torpor.connectors import ipc, link, turns
from torpor.connectors.ipc import IpcRemote
from torpor.connectors.loads import Load, LoadState
from torpor.connectors.turns import ON_THEIR_WAY, Turns
from torpor.errors import TransportError
from torpor.testing.kv_engine import KVEngine

ONE, ITS = [0], [7]  # blocks of a prompt that fits into one
SHORT = A[:4]


class Clock:
    """Stands for ``time`` in a module."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def met(tmp_path: Path) -> Iterator[tuple[KVEngine, KVEngine, Sky]]:
    with meeting(tmp_path) as met:
        yield met


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.puller.close(WAIT_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (ipc, link, turns):
        monkeypatch.setattr(module, "time", clock)
    return clock


def begin_behind_another(p: KVEngine, d: KVEngine, sky: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    """``q`` is begun, of many pieces, and waits for its turn behind ``first``, which is in the air. What ``q`` copies arrives at
    once."""
    sky.clear.clear()
    d.begin_load("first", SHORT, p.prefill("r-first", SHORT, ONE), ITS)
    assert sky.waited_for.wait(WAIT_S)
    monkeypatch.setitem(ipc.PIECE_BYTES, "host", 1)
    sky.at_once = True
    d.begin_load("q", B, p.prefill("r", B, THERE), HERE)
    assert [turn.begun is not None for turn in puller_of(d)._turns.pending()] == [True, True]


def test_p5_a_cancel_does_not_wait_for_the_loads_before_it(
    met: tuple[KVEngine, KVEngine, Sky],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, d, sky = met
    begin_behind_another(p, d, sky, monkeypatch)
    cancelled = Background(lambda: d.cancel("q"))
    assert cancelled.ended_within(5.0), "it waits for a load that is none of its business"
    assert d.wait("q") == "failed"
    assert not d.has(B, HERE), "no piece began after the cancel"
    before = [d.block(block) for block in HERE]
    sky.clear.set()
    assert d.wait("first") == "recving"
    assert p.wait("r") == "sending", "the owner was told that it may let go"
    idle(d)
    assert [d.block(block) for block in HERE] == before, "nor when its turn came"
    assert p.sleep().held_bytes == 0, "the link is in use by nobody"


def test_p5_what_is_cancelled_in_line_does_not_begin_meanwhile(
    met: tuple[KVEngine, KVEngine, Sky], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d, sky = met
    sky.clear.clear()
    all_at_once(p, d)
    assert sky.waited_for.wait(WAIT_S)
    end = puller_of(d)._end

    def ends_late(load: Load, state: LoadState, reason: str) -> None:
        """When the first one has ended, and the puller has begun what it can."""
        if load.request_id == NAMES[-1] and reason == "cancelled":
            sky.waited_for.clear()
            sky.land_one()
            assert sky.waited_for.wait(WAIT_S)
        end(load, state, reason)

    monkeypatch.setattr(puller_of(d), "_end", ends_late)
    cancelled = Background(lambda: d.cancel(NAMES[-1]))
    assert cancelled.ended_within(5.0), "its blocks are written to behind its back"
    assert sky.begun_by == ["engine"] * ON_THEIR_WAY
    sky.clear.set()
    assert [d.wait(name) for name in NAMES] == ["recving"] * ON_THEIR_WAY + ["failed"]


def test_p5_the_time_in_line_is_not_the_load_s_own(
    met: tuple[KVEngine, KVEngine, Sky],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, d, sky = met
    begin_behind_another(p, d, sky, monkeypatch)
    clock.ahead_s += 3600.0
    sky.clear.set()
    assert [d.wait(name) for name in ("first", "q")] == ["recving", "recving"]
    assert d.has(B, HERE)


def test_p5_a_begun_read_that_takes_too_long_is_cut_off(
    met: tuple[KVEngine, KVEngine, Sky],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ipc.PIECE_BYTES, "host", 1)
    p, d, sky = met
    sky.clear.clear()
    d.begin_load("q", B, p.prefill("r", B, THERE), HERE)
    assert sky.waited_for.wait(WAIT_S), "its turn has come"
    clock.ahead_s += 3600.0
    sky.clear.set()
    assert d.wait("q") == "failed"
    assert not d.has(B, HERE)


class Line:
    """``Turns`` of loads that are nothing but names. What is ``early`` cannot begin: the owner's worker has not heard of it."""

    def __init__(self) -> None:
        self.early: set[str] = set()
        self.link: Any = object()
        self._turns = Turns(lambda load: None if load.request_id in self.early else self.link)

    def add(self, *names: str) -> None:
        for name in names:
            load: Any = SimpleNamespace(request_id=name)
            self._turns.add(load)

    def turn(self) -> tuple[str, bool]:
        """Whose turn it is, and whether its read had begun. One that had not comes again."""
        turn = self._turns.next()
        assert turn is not None
        self._turns.over(again=turn.begun is None)
        return turn.load.request_id, turn.begun is not None


def test_who_was_put_aside_has_a_turn_however_many_are_behind(clock: Clock) -> None:
    line = Line()
    line.early = {"early"}
    line.add("early")
    assert line.turn() == ("early", False)
    line.add("a", "b")
    clock.ahead_s += turns.GRACE_LOOK_S
    seen = []
    for number in range(2 * ON_THEIR_WAY):
        line.add(str(number))
        seen.append(line.turn())
    assert seen[:4] == [("a", True), ("b", True), ("early", False), ("0", True)], "when those on their way have ended"


def test_a_hand_off_that_comes_late_begins_beside_the_others(clock: Clock) -> None:
    line = Line()
    line.early = {"early"}
    line.add("early")
    assert line.turn() == ("early", False)
    line.add("a")
    line.early = set()
    clock.ahead_s += turns.GRACE_LOOK_S
    line.add("b")
    assert [line.turn() for _ in range(3)] == [("a", True), ("early", True), ("b", True)]


def test_p5_whoever_cannot_be_told_of_an_end_does_not_stop_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.puller, "_ended", raises(RuntimeError("the loop is closed")))
    bench.on_read = raises(TransportError("broken"))
    bench.submit("a")
    bench.wait_until_idle()
    bench.on_read = lambda load: None
    bench.submit("b")
    bench.wait_until_idle()
    monkeypatch.undo()
    bench.submit("c")
    assert bench.outcome("c") is LoadState.DONE


def test_p5_a_surprise_of_the_transport_about_a_cancelled_load_ends_nothing_else(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench.submit("first")
    bench.outcome("first")
    bench.links[0].unknown = {9}
    bench.submit("early", lease=9)
    monkeypatch.setattr(bench.links[0], "ready", raises(ZeroDivisionError()))
    bench.puller.cancel("early")
    bench.wait_until_idle()
    bench.submit("good")
    assert bench.outcome("good") is LoadState.DONE
    assert [state for name, state in bench.ended if name == "early"] == [LoadState.FAILED]


def test_p2_a_surprise_while_an_import_is_dropped_holds_up_no_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surprises = [ValueError("a bug")]
    close = IpcRemote.close

    def closes(remote: IpcRemote) -> bool:
        if surprises:
            raise surprises.pop()
        return close(remote)

    with meeting(tmp_path) as (p, d, _):
        monkeypatch.setattr(IpcRemote, "close", closes)
        assert p.sleep().held_bytes == 0, "it was dropped when it was asked again, and the owner has heard of it"
        p.wake()
        assert d.load("q", B, p.prefill("r", B, THERE), HERE) == "recving"
