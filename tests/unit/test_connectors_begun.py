"""Reads that the engine's own thread begins, as on a GPU: the device copies while everybody else runs (P2, P3, P5)."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_pairs import WAIT_S, A, B, Background, Pairs

from torpor.connectors import ipc
from torpor.connectors.puller import JOIN_S
from torpor.connectors.turns import ON_THEIR_WAY
from torpor.errors import DeviceError, HookError, TransportError
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine

THERE, HERE = [1, 2, 3], [4, 5, 6]


class Flight:
    """Bytes that arrive when the device gets to it, and not before."""

    def __init__(self, sky: Sky, land: Callable[[], None]) -> None:
        self._sky, self._land = sky, land
        self._landed = False

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._landed:
            return
        self._landed = True
        self._sky.waited_for.set()
        self._sky.wait()
        if self._sky.crash is not None:
            raise self._sky.crash
        self._land()


class Sky:
    """Makes the memory of an engine a device that copies beside; what begins is in the air until ``clear`` is set."""

    def __init__(self, engine: KVEngine) -> None:
        self.clear = threading.Event()
        self.clear.set()
        self.waited_for = threading.Event()
        self.begun_by: list[str] = []
        self.refuses: Exception | None = None
        self.crash: Exception | None = None
        self.at_once = False  # the host driver's own way
        self._landings: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._device: Any = engine.memory.device
        self._plain = self._device.begin_copy_blocks
        self._device.copies_beside, self._device.begin_copy_blocks = True, self._begin

    def land_one(self, crash: Exception | None = None) -> None:
        """The next one that is waited for, whether or not the sky is clear."""
        self._landings.put(crash)

    def wait(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.clear.is_set():
            assert time.monotonic() < deadline, "nobody let it land"
            with contextlib.suppress(queue.Empty):
                if (crash := self._landings.get(timeout=0.005)) is not None:
                    raise crash
                return

    def _begin(self, *piece: Any, **limits: tuple[int, int]) -> Any:
        if self.refuses is not None:
            refuses, self.refuses = self.refuses, None
            raise refuses
        if self.at_once:
            return self._plain(*piece, **limits)
        self.begun_by.append("engine" if threading.current_thread() is threading.main_thread() else "puller")
        return Flight(self, lambda: self._plain(*piece, **limits).close())


@contextlib.contextmanager
def meeting(folder: Path, **settings: Any) -> Iterator[tuple[KVEngine, KVEngine, Sky]]:
    """Of two engines that have read once: their link is up, and nothing has been counted yet."""
    with contextlib.closing(Pairs("ipc", folder)) as pairs:
        p, d = pairs.pair(**settings)
        sky = Sky(d)
        assert d.load("first", A, p.prefill("first", A, THERE), HERE) == "recving"
        assert p.wait("first") == "sending"
        assert sky.begun_by == ["puller"], "there was no link yet"
        idle(d)
        sky.begun_by.clear()
        sky.waited_for.clear()
        try:
            yield p, d, sky
        finally:
            sky.clear.set()


@pytest.fixture
def met(tmp_path: Path) -> Iterator[tuple[KVEngine, KVEngine, Sky]]:
    with meeting(tmp_path) as met:
        yield met


def puller_of(engine: KVEngine) -> Any:
    worker: Any = engine.worker
    (puller,) = worker._reader._pullers.values()
    return puller


def idle(engine: KVEngine) -> None:
    deadline = time.monotonic() + WAIT_S
    while puller_of(engine).busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_read_begins_on_the_engine_s_thread_and_ends_on_the_puller_s(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    params = p.prefill("r", B, THERE)
    d.begin_load("q", B, params, HERE)
    assert sky.begun_by == ["engine"]
    d.step()
    assert not d.has(B, HERE), "nothing has arrived yet"
    sky.clear.set()
    assert d.wait("q") == "recving"
    assert d.has(B, HERE)
    assert p.wait("r") == "sending"
    assert d.worker.stats().loads_done == 2


def test_the_lease_s_word_is_computed_by_whoever_waits_for_the_copy(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    d.begin_load("q", A, p.prefill("r", A, THERE), HERE)
    (turn,) = puller_of(d)._turns.pending()
    assert sky.waited_for.wait(WAIT_S)
    assert turn.load._word is not None
    sky.clear.set()
    assert d.wait("q") == "recving"


NAMES = [str(number) for number in range(ON_THEIR_WAY + 1)]
"""Of loads that are asked for in one step, of a block each; one more than may be on their way."""


def prompt_of(name: str) -> list[int]:
    return list(range(1000 * int(name), 1000 * int(name) + SMALL_SPEC.block_size))


def all_at_once(p: KVEngine, d: KVEngine) -> None:
    for name in NAMES:
        d.begin_load(name, prompt_of(name), p.prefill(f"r{name}", prompt_of(name), [int(name)]), [int(name) + 1])


def have_come(d: KVEngine) -> list[str]:
    return [name for name in NAMES if d.has(prompt_of(name), [int(name) + 1])]


def test_the_next_reads_begin_before_the_one_before_them_has_ended(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    all_at_once(p, d)
    assert sky.waited_for.wait(WAIT_S)
    assert sky.begun_by == ["engine"] * ON_THEIR_WAY
    sky.clear.set()
    assert [d.wait(name) for name in NAMES] == ["recving"] * len(NAMES)
    assert have_come(d) == NAMES
    assert [p.wait(f"r{name}") for name in NAMES] == ["sending"] * len(NAMES)


def test_the_puller_begins_what_waits_before_it_waits_itself(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    all_at_once(p, d)
    assert sky.waited_for.wait(WAIT_S)
    sky.waited_for.clear()
    sky.land_one()
    assert d.wait(NAMES[0]) == "recving"
    assert sky.waited_for.wait(WAIT_S)
    assert sky.begun_by == ["engine"] * ON_THEIR_WAY + ["puller"], "the last, while the second is in the air"
    assert have_come(d) == NAMES[:1]
    sky.clear.set()
    assert [d.wait(name) for name in NAMES[1:]] == ["recving"] * ON_THEIR_WAY


def test_nothing_begins_beside_a_load_whose_link_is_not_up(tmp_path: Path) -> None:
    with contextlib.closing(Pairs("ipc", tmp_path)) as pairs:
        p, d = pairs.pair()
        sky = Sky(d)
        all_at_once(p, d)
        assert [d.wait(name) for name in NAMES] == ["recving"] * len(NAMES)
        assert have_come(d) == NAMES
        assert set(sky.begun_by) == {"puller"}


def test_p2_an_owner_s_sleep_waits_for_all_that_is_on_its_way(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    all_at_once(p, d)
    slept = Background(p.sleep)
    assert not slept.ended_within(0.2)
    for _ in NAMES[: ON_THEIR_WAY - 1]:
        sky.land_one()
    assert not slept.ended_within(0.2), "one is still copied out of that memory"
    sky.clear.set()
    assert slept.result().held_bytes == 0
    assert [d.wait(name) for name in NAMES][1:] == ["failed"] * ON_THEIR_WAY, "the lease had gone when their bytes were looked at"
    p.wake()
    assert d.load("q", B, p.prefill("r", B, THERE), HERE) == "recving"


def test_p5_the_link_is_dropped_when_the_last_read_over_it_has_ended(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    link = puller_of(d).link
    sky.clear.clear()
    all_at_once(p, d)
    assert sky.waited_for.wait(WAIT_S)
    sky.land_one(TransportError("the way is broken", transport="ipc"))
    assert d.wait(NAMES[0]) == "failed"
    assert not link.alive, "no read begins over it"
    began = time.monotonic()
    sky.clear.set()
    ended = [d.wait(name) for name in NAMES[1:]]
    assert time.monotonic() - began < JOIN_S, "nobody waited for a read that only this thread could end"
    assert ended == ["recving"] * ON_THEIR_WAY, "those on their way are right, the other came over a new link"
    assert have_come(d) == NAMES[1:]
    idle(d)
    assert puller_of(d).link is not link
    assert p.sleep().held_bytes == 0


def test_p5_a_cancel_waits_for_a_read_whose_turn_has_not_come(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    all_at_once(p, d)
    cancelled = Background(lambda: d.cancel(NAMES[1]))
    assert not cancelled.ended_within(0.2), "its blocks are being written to"
    sky.clear.set()
    cancelled.result()
    assert [d.wait(name) for name in NAMES] == ["recving", "failed", *["recving"] * (ON_THEIR_WAY - 1)]


def test_a_hand_off_that_has_not_come_is_awaited_by_the_puller(
    met: tuple[KVEngine, KVEngine, Sky], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d, sky = met
    with monkeypatch.context() as patch:
        patch.setattr(p, "step", lambda: None)  # the owner's worker does not hear of it
        params = p.prefill("r", B, THERE)
    d.begin_load("q", B, params, HERE)
    assert sky.begun_by == []
    p.step()
    assert d.wait("q") == "recving"
    assert d.has(B, HERE)
    assert sky.begun_by == ["puller"]


def test_p1_a_load_of_another_epoch_is_not_begun(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    old = p.prefill("r", A, THERE)
    p.sleep()
    p.wake()
    assert d.load("q", A, old, HERE) == "failed"
    assert sky.begun_by == []
    assert d.load("q2", B, p.prefill("r2", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)
    sky.begun_by.clear()
    idle(d)
    assert d.load("again", A, old, HERE) == "failed"
    assert sky.begun_by == [], "the link is of another epoch"


def test_p5_blocks_outside_the_cache_are_not_begun(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    params = p.prefill("r", A, THERE)
    sky.at_once = True
    before = [d.block(block) for block in HERE]
    for ids in ([1, 2, SMALL_SPEC.num_blocks], [1, 2, 1 << 30]):
        assert d.load(f"q{ids[2]}", A, {**params, "remote_block_ids": ids}, HERE) == "failed"
        assert [d.block(block) for block in HERE] == before


def test_p3_a_lease_that_expires_while_the_device_copies_yields_nothing(tmp_path: Path) -> None:
    with meeting(tmp_path, handoff_lease_s=0.2) as (p, d, sky):
        sky.clear.clear()
        d.begin_load("q", A, p.prefill("r", A, THERE), HERE)
        assert p.wait("r") == "sending"
        p.prefill("s", B, THERE)
        sky.clear.set()
        assert d.wait("q") == "failed"
        assert sky.begun_by == ["engine"]


def test_p2_an_owner_s_sleep_waits_for_what_the_device_copies(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    d.begin_load("q", A, p.prefill("r", A, THERE), HERE)
    slept = Background(p.sleep)
    assert not slept.ended_within(0.3), "the reader still copies out of that memory"
    sky.clear.set()
    assert slept.result().held_bytes == 0
    assert d.wait("q") == "failed"


def test_p2_an_owner_is_not_unmapped_under_a_copy_that_does_not_end(tmp_path: Path) -> None:
    with meeting(tmp_path, withdraw_timeout_s=0.3) as (p, d, sky):
        sky.clear.clear()
        d.begin_load("q", A, p.prefill("r", A, THERE), HERE)
        with pytest.raises(HookError):
            p.sleep()
        assert p.has(A, THERE), "nothing was unmapped"
        sky.clear.set()
        assert d.wait("q") == "failed"


def test_a_reader_s_sleep_waits_for_what_the_device_copies(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    d.begin_load("q", A, p.prefill("r", A, THERE), HERE)
    slept = Background(d.sleep)
    assert not slept.ended_within(0.3), "its memory is being written to"
    sky.clear.set()
    slept.result()
    assert d.wait("q") == "failed"
    assert p.sleep().held_bytes == 0


def test_p5_a_cancelled_load_is_reported_when_the_device_has_stopped(
    met: tuple[KVEngine, KVEngine, Sky], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ipc.PIECE_BYTES, "host", 1)
    p, d, sky = met
    sky.clear.clear()
    d.begin_load("q", B, p.prefill("r", B, THERE), HERE)
    assert sky.waited_for.wait(WAIT_S), "its turn has come"
    cancelled = Background(lambda: d.cancel("q"))
    assert not cancelled.ended_within(0.2), "a copy is under way"
    sky.clear.set()
    cancelled.result()
    assert d.wait("q") == "failed"
    idle(d)
    assert not d.has(B, HERE), "no piece began after the cancel"
    assert p.wait("r") == "sending", "the owner was told that it may let go"


@pytest.mark.parametrize("surprise", [DeviceError("no stream"), ValueError("a bug")])
def test_p5_what_cannot_begin_is_left_to_the_puller(met: tuple[KVEngine, KVEngine, Sky], surprise: Exception) -> None:
    p, d, sky = met
    sky.refuses = surprise
    assert d.load("q", B, p.prefill("r", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)
    assert sky.begun_by == ["puller"]


def test_p5_a_copy_that_fails_costs_one_load(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.crash = DeviceError("the copy failed")
    assert d.load("q", B, p.prefill("r", B, THERE), HERE) == "failed"
    assert p.wait("r") == "sending"
    sky.crash = None
    idle(d)
    assert d.load("q2", B, p.prefill("r2", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)
    assert sky.begun_by == ["engine", "engine"]


def test_all_pieces_of_a_large_load_arrive(met: tuple[KVEngine, KVEngine, Sky], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ipc.PIECE_BYTES, "host", 1)
    p, d, _ = met
    assert d.load("q", B, p.prefill("r", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)


def test_a_shutdown_waits_for_what_the_device_copies(met: tuple[KVEngine, KVEngine, Sky]) -> None:
    p, d, sky = met
    sky.clear.clear()
    d.begin_load("q", A, p.prefill("r", A, THERE), HERE)
    closed = Background(d.worker.shutdown)
    assert not closed.ended_within(0.3)
    sky.clear.set()
    closed.result()
    assert not puller_of(d).busy
