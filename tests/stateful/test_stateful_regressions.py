"""What the state machines found, each as the shortest history that showed it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pair_sides import HAND_OFF, Asked, Side

from torpor.engine.base import EngineState, SleepRequest
from torpor.request import SamplingParams
from torpor.testing.clock import FakeClock
from torpor.testing.pinned import pinning_is_permitted

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
SOME = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
PROMPT = list(range(9))
needs_pinning = pytest.mark.skipif(not pinning_is_permitted(), reason="io_uring cannot pin memory here")


class Pair:
    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.handed_off: list[Asked] = []
        self.p = Side("ipc", "producer", folder, self.clock, 8, 3, self.handed_off.append)
        self.d = Side("ipc", "consumer", folder, self.clock, 8, 3, self.handed_off.append)

    def nap(self) -> None:
        """P sleeps as soon as what runs has ended, and wakes."""
        slept = self.p.core.sleep(SleepRequest(level=1, mode="wait"))
        self.p.until(lambda: self.p.state is EngineState.ASLEEP, "a sleep")
        assert slept.result(0)["state"] == "asleep"
        self.p.core.wake_up()
        self.p.until(lambda: self.p.awake, "a wake")

    def prefill(self, name: str, prompt: list[int]) -> None:
        asked = self.p.add(name, prompt, ONE, dict(HAND_OFF))
        self.p.until(lambda: asked.end is not None, "a prefill")

    def close(self) -> None:
        self.p.shut_down()
        self.d.shut_down()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_p1_a_hand_off_that_was_not_granted_before_the_sleep_is_not_granted_after_it(pair: Pair) -> None:
    """Its blocks are free: under the new epoch a client could have had somebody else's KV, with a word that proves it."""
    pair.p.add("x", PROMPT, ONE, dict(HAND_OFF))
    pair.p.step()  # it runs, so the sleep waits for it, and begins in the step that ends it
    pair.nap()
    pair.p.step(2)
    pair.p.check()
    stats = pair.p.core.stats()
    assert stats.connector is not None
    assert (stats.connector.pending_hand_offs, stats.scheduler.handed_off) == (0, 0)
    assert pair.handed_off[0].end is not None
    params = copy.deepcopy(pair.handed_off[0].end.kv_transfer_params)
    assert params is not None
    params["torpor"]["epoch"] = pair.p.epoch
    asked = pair.d.add("forged", PROMPT, SOME, params)
    pair.d.until(lambda: asked.end is not None, "an answer")
    pair.d.check()
    assert pair.d.core.stats().scheduler.loads_failed == 1


def test_p1_the_end_of_a_hand_off_from_before_the_sleep_does_not_end_one_of_the_same_name(pair: Pair) -> None:
    """A client that retries under its old name, and a prefill that takes one step."""
    pair.prefill("x", PROMPT)
    pair.p.step()
    pair.nap()
    pair.prefill("x", PROMPT[:3])
    pair.p.step(2)
    pair.p.check()
    assert pair.p.core.stats().scheduler.handed_off == 1


def test_p2_an_owner_told_before_it_knows_of_the_hand_off_lets_go_all_the_same(pair: Pair) -> None:
    """A prompt of one token leaves nothing to read: D only tells, and was here before P's worker had granted the lease."""
    for name in ("first", "second"):  # over a link that is there, it takes no time
        asked = pair.p.add(name, [7], ONE, dict(HAND_OFF))
        while asked.end is None:
            pair.p.step()
        reader = pair.d.add(f"d {name}", [7], SOME, asked.end.kv_transfer_params)
        pair.d.until(lambda reader=reader: reader.end is not None, "an answer")
        time.sleep(0.1)
        pair.p.until(lambda: pair.p.core.stats().scheduler.handed_off == 0, "the end of the hand-off")
    pair.p.check()


@needs_pinning
def test_m11_a_sleep_of_the_weights_alone_misses_nothing_of_a_kv_cache_that_stays_pinned(tmp_path: Path) -> None:
    """A registration of the KV cache that came after the weights were mapped looked like a hold on the weights."""
    p = Side("pinned", "producer", tmp_path, FakeClock(), 8, 3, lambda asked: None)
    for _ in range(2):
        slept = p.core.sleep(SleepRequest(policies={"weights": "discard"}, mode="abort"))
        p.until(slept.done, "a sleep")
        report = slept.result(0)
        assert report["held_bytes"] == 0, report
        assert report["returned_bytes"] == report["unmapped_bytes"] > 0
        p.core.wake_up()
        p.until(lambda: p.awake, "a wake")
    p.shut_down()
