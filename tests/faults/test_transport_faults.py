"""P2, P4a, M2, M3: the transport fails to register the KV cache or to let it go, at a sleep or at a wake. The engine is never
awake with peers that can read nothing, and never unmaps what its transport still holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_engine import Engine, Peer, failure_of
from fault_points import FOR_EVER, FULL, SEED, tried

from torpor._native import Device
from torpor.connectors import pins
from torpor.connectors.pins import PinWatch
from torpor.engine.base import EngineState
from torpor.errors import SleepAborted, TransportError
from torpor.memory import Residency
from torpor.testing.kv_engine import missing_package

CONNECTORS = ["ipc", "nixl", "mooncake"]
TRANSPORT = ["publish", "unpublish"]
# The package behind the transport: where it is, what of it can fail, and which two of these register and let go.
PACKAGES = {
    "nixl": ("_agent", ["register", "deregister", "metadata"], "register", "deregister"),
    "mooncake": ("_engine", ["register", "unregister"], "register", "unregister"),
}
BUDGET = 2  # points of a test, in a bounded run
CALLS: dict[str, tuple[Callable[[Engine], None], Callable[[Engine], None]]] = {
    "sleep level 1": (lambda e: None, lambda e: e.sleep(level=1)),
    "sleep level 2": (lambda e: None, lambda e: e.sleep(level=2)),
    "release_kv_cache": (lambda e: None, lambda e: e.release_kv()),
    "wake": (lambda e: e.sleep(level=1), lambda e: e.wake()),
    "wake of kv_cache": (lambda e: e.sleep(level=1), lambda e: e.wake(["kv_cache"])),
}


LIMIT_S = 3600 if FULL else 120


class Breaker:
    """Stands in methods of one object: those named in ``failing`` raise without doing anything, as often as it says. Counts what
    is registered and not let go."""

    def __init__(self, target: Any, names: list[str], register: str, deregister: str) -> None:
        self.failing: dict[str, int] = {}
        self.struck = 0
        self.held = 0
        self.names = names
        self.deregister = deregister
        self._target = target
        for name in names:
            change = (name == register) - (name == deregister)
            setattr(target, name, self._wrapped(name, getattr(target, name), change))

    def _wrapped(self, name: str, real: Callable[..., Any], change: int) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            if self.failing.get(name, 0) > 0:
                self.failing[name] -= 1
                self.struck += 1
                raise TransportError(f"{name} was told to fail", transport="test")
            result = real(*args)
            self.held += change
            return result

        return wrapper


@pytest.fixture(params=CONNECTORS, scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if missing := missing_package(request.param):
        pytest.skip(missing)
    peer = Peer(request.param, Path(tmp_path_factory.mktemp("kv")))
    device = Device.open("host", faults=True)
    engine = Engine(device, peer)
    yield engine
    engine.close()
    peer.kv.close()
    device.close()


@pytest.fixture(scope="module")
def breakers(engine: Engine) -> dict[str, Breaker]:
    """One at the transport's contract, and for NIXL one at the package."""
    assert engine.connector is not None
    transport = engine.connector._transport
    made = {"transport": Breaker(transport, TRANSPORT, "publish", "")}
    if transport.name in PACKAGES:
        where, *names = PACKAGES[transport.name]
        made["agent"] = Breaker(getattr(transport, where), *names)
        made["agent"].held = 1  # the KV cache is registered already
    return made


def kinds(breakers: dict[str, Breaker]) -> list[tuple[Breaker, str]]:
    return [(breaker, name) for breaker in breakers.values() for name in breaker.names]


def check_let_go(engine: Engine, breakers: dict[str, Breaker]) -> None:
    """What is not mapped is registered nowhere."""
    kv = engine.worker.memory.stats().tag("kv_cache")
    agent = breakers.get("agent")
    if kv.residency is not Residency.RESIDENT:
        assert agent is None or agent.held == 0
        assert engine.connector is not None
        assert getattr(engine.connector._transport, "_exported", None) is None
    elif engine.state is EngineState.AWAKE:
        assert agent is None or agent.held == 1


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("count", [1, 2, 3, FOR_EVER], ids=["once", "twice", "three times", "from then on"])
@pytest.mark.parametrize("call", CALLS)
def test_p2_a_transport_fails(engine: Engine, breakers: dict[str, Breaker], call: str, count: int) -> None:
    run(engine, breakers, call, [{which: count} for which in range(len(kinds(breakers)))])


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("call", CALLS)
def test_p2_a_transport_fails_and_its_undo(engine: Engine, breakers: dict[str, Breaker], call: str) -> None:
    every = range(len(kinds(breakers)))
    run(engine, breakers, call, [{a: n, b: m} for a in every for b in every if a < b for n in (1, 2) for m in (1, 2)])


def test_p2_what_could_not_be_let_go_of_is_not_forgotten(engine: Engine, breakers: dict[str, Breaker]) -> None:
    """NIXL's registration was dropped here although NIXL still had it: the next sleep unmapped under it."""
    names = [name for _, name in kinds(breakers)]
    which = names.index(breakers["agent"].deregister if "agent" in breakers else "unpublish")
    run(engine, breakers, "sleep level 1", [{which: 1}, {which: 2}])


def run(engine: Engine, breakers: dict[str, Breaker], call: str, points: list[dict[int, int]]) -> None:
    before, under_fault = CALLS[call]
    assert engine.peer is not None
    name = f"transport: {call} [{engine.peer.connector}]"
    for point in points if FULL else random.Random(f"{SEED} {name} {len(points)}").sample(points, min(BUDGET, len(points))):
        unread, content = engine.refresh()
        before(engine)
        for which, count in point.items():
            breaker, method = kinds(breakers)[which]
            breaker.failing[method] = count
        failure_of(lambda: under_fault(engine))
        engine.check(rss=True)
        check_let_go(engine, breakers)
        struck = 0
        for breaker in breakers.values():
            breaker.failing.clear()
            struck += breaker.struck
            breaker.struck = 0
        under_fault(engine)
        check_let_go(engine, breakers)
        if engine.state is EngineState.ASLEEP:
            engine.wake()
        engine.check_serves(unread, content)
        check_let_go(engine, breakers)
        tried[name] += bool(struck)


class PinningCache:
    """What a transport pins that keeps deregistered memory while ``keeps`` is true, as UCX does with its registration cache."""

    def __init__(self, connector: Any) -> None:
        self.keeps = False
        self.pinned = 0
        transport, size = connector._transport, connector._geometry.nbytes
        publish, unpublish = transport.publish, transport.unpublish

        def pinning_publish() -> Any:
            publication = publish()
            self.pinned = size
            return publication

        def pinning_unpublish() -> None:
            unpublish()
            if not self.keeps:
                self.pinned = 0

        transport.publish, transport.unpublish = pinning_publish, pinning_unpublish


def test_p4a_what_stays_pinned_stops_every_sleep_until_it_is_gone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pins of a failed release are nobody else's, however often it is registered anew."""
    assert engine.connector is not None
    cache = PinningCache(engine.connector)
    monkeypatch.setattr(pins, "SETTLE_S", 0.0)
    monkeypatch.setattr(engine.connector, "_pins", PinWatch(lambda: cache.pinned))
    engine.sleep(level=1)
    engine.wake()
    cache.keeps = True
    for _ in range(3):
        with pytest.raises(SleepAborted, match="pinned"):
            engine.sleep(level=1)
        engine.check()
        assert engine.state is EngineState.AWAKE
    cache.keeps = False
    engine.sleep(level=1)
    engine.wake()
    engine.check_serves(None, [])
