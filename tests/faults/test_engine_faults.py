"""M12, M2-M6, E3, E9: whatever driver call fails in a sleep, a wake or a release of a whole engine, the engine is in a state with
a name, the kernel agrees with what it says, peers get the right bytes or none, the same call works afterwards, nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_engine import Engine, Peer, failure_of
from fault_points import EVERY_PAIR, FOR_EVER, FULL, SEED, Point, armed, calls_of, share, singles, tried

from torpor._native import Device, Op
from torpor.engine.base import EngineState

Call = Callable[[Engine], None]


def sleep(**fields: Any) -> Call:
    return lambda engine: engine.sleep(**fields)


def wake(*tags: str) -> Call:
    return lambda engine: engine.wake(tags or None)


def release(engine: Engine) -> None:
    engine.release_kv()


def nothing(engine: Engine) -> None: ...


def both(*calls: Call) -> Call:
    def run(engine: Engine) -> None:
        for call in calls:
            call(engine)

    return run


@dataclass(frozen=True)
class Table:
    """``call`` under faults, from an engine that is awake and did ``before``. ``other`` is the way that is not the same call
    again: back, or on."""

    call: Call
    other: Call
    before: Call = nothing


LEVEL_1, LEVEL_2 = sleep(level=1), sleep(level=2)
TABLES = {
    "sleep level 1": Table(LEVEL_1, wake()),
    "sleep level 2": Table(LEVEL_2, wake()),
    "discard weights": Table(sleep(policies={"weights": "discard"}), wake()),
    "discard kv_cache": Table(sleep(policies={"kv_cache": "discard"}), wake()),
    "discard runtime": Table(sleep(policies={"runtime": "discard"}), wake()),
    "everything to the host": Table(sleep(policies=dict.fromkeys(("weights", "kv_cache", "runtime"), "host")), wake()),
    "release_kv_cache": Table(release, LEVEL_1),
    "deeper: release_kv_cache, level 1": Table(LEVEL_1, wake(), release),
    "deeper: weights awake, level 2": Table(LEVEL_2, wake(), both(LEVEL_1, wake("weights"))),
    "deeper: kv_cache awake, level 1": Table(LEVEL_1, wake(), both(LEVEL_1, wake("kv_cache"))),
    "wake of level 1": Table(wake(), LEVEL_1, LEVEL_1),
    "wake of level 2": Table(wake(), LEVEL_2, LEVEL_2),
    "wake of release_kv_cache": Table(wake(), LEVEL_1, release),
    "wake of weights": Table(wake("weights"), LEVEL_1, LEVEL_1),
    "wake of kv_cache": Table(wake("kv_cache"), wake("weights", "runtime"), LEVEL_1),
    "wake of kv_cache, the rest is awake": Table(wake("kv_cache"), wake(), both(LEVEL_1, wake("weights", "runtime"))),
}
CONNECTORS = ["none", "ipc", "nixl"]
SINGLES = {"none": 4, "ipc": 2, "nixl": 1}  # of a table, in a bounded run
PAIRS = {"none": 1, "ipc": 1, "nixl": 1}
PAIR_TABLES = list(TABLES) if FULL else random.Random(SEED).sample(list(TABLES), 4)
FIRSTS = {"none": 40, "ipc": 12, "nixl": 4}  # of a table, in a full run
SECONDS = {"none": 2, "ipc": 1, "nixl": 1}  # for each of them
LIMIT_S = 6 * 3600 if FULL else 120


@pytest.fixture(scope="module", params=CONNECTORS)
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer | None]:
    if request.param == "none":
        yield None
        return
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    peer = Peer(request.param, Path(tmp_path_factory.mktemp("kv")))
    yield peer
    peer.kv.close()


@pytest.fixture(scope="module")
def engine(peer: Peer | None) -> Iterator[Engine]:
    """One for all tables: what a point leaves behind would be seen by the next."""
    device = Device.open("host", faults=True)
    engine = Engine(device, peer)
    for _ in range(2):  # what is made once, at the first use
        LEVEL_1(engine)
        wake()(engine)
        engine.check_serves(None, [])
    yield engine
    engine.close()
    device.close()


class Trial:
    """One point: the engine before it, the fault, and all that must be true after it."""

    def __init__(self, engine: Engine, table: Table) -> None:
        self.engine = engine
        self.table = table
        self.unread, self.content = engine.refresh()
        self.before = engine.footprint()
        table.before(engine)

    def strike(self, call: Call, *points: Point) -> tuple[bool, bool]:
        """Whether all points were reached, and whether the call failed."""
        with armed(self.engine.device, *points) as arms:
            error = failure_of(lambda: call(self.engine))
        self.engine.check(rss=True)
        return arms.all_reached, error is not None

    def end(self) -> None:
        """Back to an engine that serves, with nothing left behind."""
        engine = self.engine
        if engine.state is EngineState.ASLEEP:
            engine.wake()
        if engine.device.stats().condemned_bytes:  # not taken back by the driver twice: the next sleep asks again
            engine.sleep(policies=dict.fromkeys(("weights", "kv_cache", "runtime"), "host"))
            engine.wake()
        engine.check_serves(self.unread, self.content)
        engine.release_images()
        engine.check_footprint(self.before)

    def calls(self) -> dict[Op, int]:
        made = calls_of(self.engine.device, lambda: self.table.call(self.engine))
        self.end()
        return made


def one(engine: Engine, table: Table, again: Call, *points: Point) -> bool:
    trial = Trial(engine, table)
    reached, _ = trial.strike(table.call, *points)
    again(engine)
    engine.check()
    trial.end()
    return reached


def connector_of(engine: Engine) -> str:
    return engine.peer.connector if engine.peer else "none"


def name_of(table: str, engine: Engine, kind: str) -> str:
    return f"{kind}: {table} [{connector_of(engine)}]"


def firsts_of(engine: Engine, calls: dict[Op, int], name: str) -> list[Point]:
    of = FIRSTS if FULL else PAIRS
    return share(singles(calls), of[connector_of(engine)], name, bounded=not EVERY_PAIR)


def seconds_of(engine: Engine, first: Point, made: dict[Op, int], name: str) -> list[Point]:
    """For each first fault some at random, or all."""
    return share(singles(made), SECONDS[connector_of(engine)] if FULL else 1, f"{name} {first}", bounded=not EVERY_PAIR)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("table", TABLES)
def test_m12_one_call_fails(engine: Engine, table: str) -> None:
    """Once, twice in a row, and from then on; then the same call again, and the other way."""
    what = TABLES[table]
    name = name_of(table, engine, "one")
    calls = Trial(engine, what).calls()
    points = [p for count in (1, 2, FOR_EVER) for p in singles(calls, count)]
    for number, point in enumerate(share(points, SINGLES[connector_of(engine)], name)):
        again = [what.call, what.other] if FULL else [(what.call, what.other)[number % 2]]
        for way in again:
            tried[name] += one(engine, what, way, point)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("table", PAIR_TABLES)
def test_m12_a_call_and_its_undo_fail(engine: Engine, table: str) -> None:
    """Two operations in one call: the failure, and what the failure sets off."""
    what = TABLES[table]
    name = name_of(table, engine, "undo")
    for first in firsts_of(engine, Trial(engine, what).calls(), name):
        trial = Trial(engine, what)
        made = calls_of(engine.device, lambda t=trial, p=first: t.strike(what.call, p))
        trial.end()
        made.pop(first.op)
        for second in seconds_of(engine, first, made, name):
            tried[name] += one(engine, what, what.call, first, second)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("way", ["again", "other"])
@pytest.mark.parametrize("table", PAIR_TABLES)
def test_m12_a_call_and_the_next_one_fail(engine: Engine, table: str, way: str) -> None:
    what = TABLES[table]
    name = name_of(table, engine, f"then {way}")
    next_call = what.call if way == "again" else what.other
    for first in firsts_of(engine, Trial(engine, what).calls(), name):
        trial = Trial(engine, what)
        trial.strike(what.call, first)
        made = calls_of(engine.device, lambda: next_call(engine))
        trial.end()
        for second in seconds_of(engine, first, made, name):
            trial = Trial(engine, what)
            trial.strike(what.call, first)
            reached, _ = trial.strike(next_call, second)
            next_call(engine)
            engine.check()
            trial.end()
            tried[name] += reached
