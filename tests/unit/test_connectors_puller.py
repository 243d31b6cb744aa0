"""P1 and P5 where a load waits for its peer: which link it gets, and that one bad peer or load never stops the thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torpor.connectors import puller
from torpor.connectors.base import LoadRequest
from torpor.connectors.loads import Load, LoadState
from torpor.connectors.puller import Puller
from torpor.connectors.transport import Target
from torpor.errors import PeerError, TransportError
from torpor.kvcache.types import BlockId, Epoch

OLD, NOW, NEXT = (Epoch("00000000000000ab", n) for n in (6, 7, 8))
WAIT_S = 30.0


class FakeLink:
    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.alive = True
        self.told: list[int] = []
        self.unknown: set[int] = set()  # leases that the owner's worker has not heard of

    def __str__(self) -> str:
        return "engine 'P'"

    def ready(self, load: Load) -> bool:
        return load.lease not in self.unknown

    def tell_done(self, load: Load) -> None:
        self.told.append(load.lease)

    def stop(self) -> None:
        self.alive = False

    def close(self, timeout_s: float) -> bool:
        self.alive = False
        return True


class Bench:
    """A puller whose peer is in the epoch ``self.epoch``."""

    def __init__(self) -> None:
        self.epoch = NOW
        self.links: list[FakeLink] = []
        self.on_connect: Callable[[], None] = lambda: None
        self.on_read: Callable[[Load], None] = lambda load: None
        self.ended: list[tuple[str, LoadState]] = []
        self._changed = threading.Condition()
        self.puller = Puller(Target(engine_id="P", host="", port=0), self._connect, self._read, self._ended)  # type: ignore[arg-type]

    def _connect(self, target: Target) -> FakeLink:
        self.on_connect()
        self.links.append(FakeLink(self.epoch))
        return self.links[-1]

    def _read(self, link: FakeLink, load: Load) -> None:
        self.on_read(load)

    def _ended(self, load: Load) -> None:
        with self._changed:
            self.ended.append((load.request_id, load.state))
            self._changed.notify_all()

    def submit(self, name: str, epoch: Epoch = NOW, lease: int = 1, blocks: int = 1) -> Load:
        params = {
            "remote_engine_id": "P",
            "remote_request_id": name,
            "remote_block_ids": [0],
            "remote_host": "",
            "remote_port": 0,
            "remote_num_tokens": 1,
            "torpor": {"epoch": str(epoch), "lease": lease},
        }
        load = Load(LoadRequest(request_id=name, local_block_ids=[BlockId(b) for b in range(blocks)], params=params))
        self.puller.submit(load)
        return load

    def outcome(self, name: str) -> LoadState:
        with self._changed:
            assert self._changed.wait_for(lambda: any(n == name for n, _ in self.ended), WAIT_S), f"{name} did not end"
        return next(state for n, state in self.ended if n == name)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.puller.busy and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not self.puller.busy


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.puller.close(WAIT_S)


def raises(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> None:
        raise error

    return call


def test_p1_one_link_serves_loads_of_its_epoch(bench: Bench) -> None:
    for name in "abc":
        bench.submit(name)
        assert bench.outcome(name) is LoadState.DONE
    assert len(bench.links) == 1
    assert bench.links[0].told == [1, 1, 1]


def test_p1_an_older_epoch_is_lost_after_one_fresh_handshake(bench: Bench) -> None:
    bench.submit("now")
    bench.outcome("now")
    bench.submit("old", OLD)
    assert bench.outcome("old") is LoadState.FAILED
    assert len(bench.links) == 2
    assert not bench.links[0].alive
    bench.submit("again")
    assert bench.outcome("again") is LoadState.DONE
    assert len(bench.links) == 2, "the fresh link is good for loads of its epoch"


def test_p1_a_newer_epoch_makes_a_new_handshake(bench: Bench) -> None:
    bench.submit("now")
    bench.outcome("now")
    bench.epoch = NEXT
    bench.submit("next", NEXT)
    assert bench.outcome("next") is LoadState.DONE
    assert [link.epoch for link in bench.links] == [NOW, NEXT]


@pytest.mark.parametrize("asked", [OLD, NEXT, Epoch("00000000000000ac", 7)])
def test_p1_there_is_no_order_between_epochs(bench: Bench, asked: Epoch) -> None:
    bench.submit("x", asked)
    assert bench.outcome("x") is LoadState.FAILED


def test_p5_a_failed_way_gets_a_new_link_next_time(bench: Bench) -> None:
    bench.on_read = raises(TransportError("broken"))
    bench.submit("a")
    assert bench.outcome("a") is LoadState.FAILED
    bench.on_read = lambda load: None
    bench.submit("b")
    assert bench.outcome("b") is LoadState.DONE
    assert len(bench.links) == 2


def test_p5_a_refused_load_keeps_the_link_and_tells_the_owner(bench: Bench) -> None:
    bench.on_read = raises(PeerError("not leased"))
    bench.submit("a", lease=7)
    assert bench.outcome("a") is LoadState.FAILED
    bench.on_read = lambda load: None
    bench.submit("b", lease=8)
    assert bench.outcome("b") is LoadState.DONE
    assert len(bench.links) == 1
    assert bench.links[0].told == [7, 8]


def test_p5_a_surprise_of_the_transport_ends_one_load(bench: Bench) -> None:
    bench.on_read = raises(ZeroDivisionError())
    bench.submit("a")
    assert bench.outcome("a") is LoadState.FAILED
    bench.on_read = lambda load: None
    bench.submit("b")
    assert bench.outcome("b") is LoadState.DONE


def test_whoever_waits_behind_a_peer_that_cannot_be_reached_hears_it_too(bench: Bench) -> None:
    reached, go = threading.Event(), threading.Event()

    def connect() -> None:
        reached.set()
        go.wait(WAIT_S)
        raise PeerError("nobody there")

    bench.on_connect = connect
    bench.submit("a")
    assert reached.wait(WAIT_S)
    for name in "bcd":
        bench.submit(name)
    go.set()
    assert {bench.outcome(name) for name in "abcd"} == {LoadState.FAILED}


def test_what_only_tells_is_never_reported(bench: Bench) -> None:
    bench.submit("quiet", lease=5, blocks=0)
    bench.submit("loud")
    assert bench.outcome("loud") is LoadState.DONE
    assert bench.ended == [("loud", LoadState.DONE)]
    assert bench.links[0].told == [5, 1]


def test_no_link_comes_up_while_we_release(bench: Bench) -> None:
    reached, go = threading.Event(), threading.Event()

    def connect() -> None:
        reached.set()
        go.wait(WAIT_S)

    bench.on_connect = connect
    bench.submit("a")
    assert reached.wait(WAIT_S)
    assert bench.puller.release(1.0)
    assert bench.outcome("a") is LoadState.FAILED
    bench.submit("b")
    assert bench.outcome("b") is LoadState.FAILED
    go.set()
    bench.wait_until_idle()
    assert bench.puller.link is None
    assert not bench.links[0].alive
    bench.puller.admit()
    bench.on_connect = lambda: None
    bench.submit("c")
    assert bench.outcome("c") is LoadState.DONE


def test_a_hand_off_that_does_not_come_holds_up_no_other_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client made it up, or the owner's worker is slow: the others of that peer are read meanwhile."""
    monkeypatch.setattr(puller, "GRACE_S", 2.0)
    bench.submit("first")
    bench.outcome("first")
    bench.links[0].unknown = {9}
    begun = time.monotonic()
    bench.submit("forged", lease=9)
    for number in range(5):
        bench.submit(f"good {number}", lease=2 + number)
    assert {bench.outcome(f"good {number}") for number in range(5)} == {LoadState.DONE}
    assert time.monotonic() - begun < 1.0
    assert bench.puller.busy
    assert bench.outcome("forged") is LoadState.FAILED
    assert time.monotonic() - begun >= 2.0
    assert 9 not in bench.links[0].told


def test_a_hand_off_that_comes_late_is_read_then(bench: Bench) -> None:
    bench.submit("first")
    bench.outcome("first")
    bench.links[0].unknown = {9}
    bench.submit("early", lease=9)
    bench.submit("good")
    assert bench.outcome("good") is LoadState.DONE
    assert ("early", LoadState.DONE) not in bench.ended
    bench.links[0].unknown = set()
    assert bench.outcome("early") is LoadState.DONE
    assert bench.links[0].told == [1, 1, 9]


def test_what_was_cancelled_while_its_hand_off_was_awaited_is_told_once_it_has_come(bench: Bench) -> None:
    bench.submit("first")
    bench.outcome("first")
    link = bench.links[0]
    link.unknown = {9}
    bench.submit("early", lease=9)
    bench.puller.cancel("early")
    assert bench.outcome("early") is LoadState.FAILED
    bench.submit("good")
    assert bench.outcome("good") is LoadState.DONE
    assert link.told == [1, 1]
    link.unknown = set()
    bench.wait_until_idle()
    assert link.told == [1, 1, 9]


def test_a_release_ends_what_waits_for_its_hand_off(bench: Bench) -> None:
    bench.submit("first")
    bench.outcome("first")
    bench.links[0].unknown = {9}
    bench.submit("early", lease=9)
    bench.submit("good")
    bench.outcome("good")
    assert bench.puller.release(1.0)
    assert bench.outcome("early") is LoadState.FAILED
    bench.wait_until_idle()
    assert (len(bench.links), bench.links[0].told) == (1, [1, 1])
