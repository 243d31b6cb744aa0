"""M12: a driver call fails while an engine comes up or ends. What was not done is told, can be done again, and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_engine import FAILURES, Engine, Peer
from fault_points import FOR_EVER, FULL, Point, armed, calls_of, share, singles, tried
from kernel_view import Footprint

from torpor._native import Device
from torpor.engine.base import EngineState

CONNECTORS = ["none", "ipc", "nixl"]
SLEEPS = {"awake": None, "asleep": {"level": 1}, "kv_cache released": {"policies": {"kv_cache": "discard"}}}
BUDGET = {"none": 5, "ipc": 2, "nixl": 1}


@pytest.fixture(params=CONNECTORS)
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer | None]:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    peer = Peer(request.param, tmp_path) if request.param != "none" else None
    yield peer
    if peer is not None:
        peer.kv.close()


def end(device: Device) -> None:
    """Nothing lies on it any more."""
    gc.collect()
    stats = device.stats()
    assert (stats.live_regions, stats.live_arenas, stats.mapped_bytes, stats.condemned_bytes) == (0, 0, 0, 0)
    device.close()


def footprint(peer: Peer | None) -> Footprint | None:
    """NIXL's own libraries keep what they opened."""
    gc.collect()
    return None if peer is not None and peer.connector == "nixl" else Footprint.now()


@pytest.mark.timeout(3600 if FULL else 120)
def test_m12_a_start_that_fails_leaves_nothing(peer: Peer | None) -> None:
    name = f"start [{peer.connector if peer else 'no connector'}]"
    calls = whole_life(peer)
    before = footprint(peer)
    for point in share(singles(calls), 2 * BUDGET[peer.connector if peer else "none"], name):
        device = Device.open("host", faults=True)
        engine = None
        with armed(device, point) as arms, contextlib.suppress(*FAILURES):
            engine = Engine(device, peer)
        if engine is not None:
            engine.check_serves(None, [])
            engine.close()
        end(device)
        tried[name] += arms.all_reached
    if before is not None:
        before.check_back()


def whole_life(peer: Peer | None) -> dict:
    device = Device.open("host", faults=True)
    made: list[Engine] = []
    calls = calls_of(device, lambda: made.append(Engine(device, peer)))
    made[0].check_serves(None, [])
    made.pop().close()
    end(device)
    return calls


@pytest.mark.timeout(3600 if FULL else 120)
@pytest.mark.parametrize("state", SLEEPS)
def test_m12_a_shutdown_that_fails_can_be_repeated(peer: Peer | None, state: str) -> None:
    name = f"shutdown: {state} [{peer.connector if peer else 'no connector'}]"
    calls, _ = shut_down(peer, state)
    assert calls, "a shutdown that calls no driver has nothing to fail"
    before = footprint(peer)
    points = [p for count in (1, FOR_EVER) for p in singles(calls, count)]
    for point in share(points, BUDGET[peer.connector if peer else "none"], name):
        _, reached = shut_down(peer, state, point)
        tried[name] += reached
    if before is not None:
        before.check_back()


def shut_down(peer: Peer | None, state: str, *points: Point) -> tuple[dict, bool]:
    """The calls it makes, and whether all points were reached."""
    device = Device.open("host", faults=True)
    engine = Engine(device, peer)
    if peer is not None:
        assert peer.read(engine.hand_off()) is not None  # a reader that has to be got rid of
    if (how := SLEEPS[state]) is not None:
        engine.sleep(**how)
    with armed(device, *points) as arms:
        calls = calls_of(device, lambda: quietly(engine))
    assert engine.state is EngineState.DEAD
    engine.close()
    engine.close()
    end(device)
    return calls, arms.all_reached


def quietly(engine: Engine) -> None:
    with contextlib.suppress(*FAILURES):
        engine.core.shutdown()
