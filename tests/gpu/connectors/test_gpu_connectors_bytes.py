"""Deaths, and bytes of the device. They are all processes': nobody else may work on it meanwhile."""

from __future__ import annotations

import signal
import time

import pytest
from connector_kit import HERE, LARGE, SLACK_BYTES, THERE, A, B, comes_down_to, nbytes_of, tokens_of, used_bytes
from kv_meeting import UNFOLLOWED_IPC, Meeting

pytestmark = pytest.mark.gpu


def test_bytes_are_flat_whoever_sleeps(large: Meeting) -> None:
    p, d = large.child("P", "producer"), large.child("D", "consumer")
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    awake, asleep = [], []
    for cycle in range(5):
        for engine in (p, d):
            assert engine.call("sleep")["held_bytes"] == 0
        asleep.append(used_bytes())
        for engine in (p, d):
            engine.call("wake")
        prompt = [cycle, *B[1:]]
        assert d.call("load", f"q{cycle}", prompt, p.call("prefill", f"r{cycle}", prompt, THERE), HERE) == "recving"
        assert d.call("has", prompt, HERE)
        awake.append(used_bytes())
    assert max(awake) - min(awake) < SLACK_BYTES // 8, awake
    assert max(asleep) - min(asleep) < SLACK_BYTES // 8, asleep
    both = 2 * nbytes_of(LARGE)
    assert both <= awake[-1] - asleep[-1] < both + SLACK_BYTES


@pytest.mark.parametrize("large", ["ipc"], indirect=True)
def test_bytes_come_back_from_a_reader_that_is_killed_with_an_import(large: Meeting) -> None:
    p = large.child("P", "producer")
    p.wait_until_up()
    alone = used_bytes()
    d = large.child("D", "consumer")
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    everything = list(range(LARGE.num_blocks))
    big = tokens_of(LARGE.num_blocks, 1)
    d.begin("load", "w", big, p.call("prefill", "big", big, everything), everything)
    time.sleep(0.005)
    d.send_signal(signal.SIGKILL)
    assert d.death() == -signal.SIGKILL
    report = p.call("sleep")
    assert (report["held_bytes"], report["tags"][0]["holders"]) == (0, [])
    left = alone - nbytes_of(LARGE) + SLACK_BYTES // 2
    assert comes_down_to(left) <= left
    p.call("wake")
    again = large.child("D", "consumer")
    assert again.call("load", "s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert again.call("has", B, HERE)


@pytest.mark.parametrize("large", ["ipc"], indirect=True)
def test_bytes_come_back_from_an_owner_that_is_killed(large: Meeting) -> None:
    """The reader drops its import when the connection ends."""
    d = large.child("D", "consumer")
    d.wait_until_up()
    alone = used_bytes()
    p = large.child("P", "producer")
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    lost = p.call("prefill", "lost", B, THERE)
    p.send_signal(signal.SIGKILL)
    p.death()
    left = alone + SLACK_BYTES // 2
    assert comes_down_to(left) <= left
    assert d.call("load", "lost", B, lost, HERE) == "failed"
    assert d.call("sleep")["held_bytes"] == 0
    d.call("wake")
    p = large.child("P", "producer")
    assert d.call("load", "s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert d.call("has", B, HERE)


@pytest.mark.parametrize("large", ["ipc"], indirect=True)
def test_bytes_are_held_twice_when_registrations_do_not_follow(large: Meeting) -> None:
    """The fault of the seeds, with connectors that say they follow the mapping and do not: old bytes, reported as loaded."""
    p = large.child("P", "producer", kind=UNFOLLOWED_IPC)
    d = large.child("D", "consumer", kind=UNFOLLOWED_IPC)
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    before = used_bytes()
    report = p.call("sleep")
    (tag,) = report["tags"]
    assert report["held_bytes"] == tag["unmapped_bytes"] >= nbytes_of(LARGE)
    assert [f"peer D (pid {d.pid})" in holder["who"] for holder in tag["holders"]] == [True], tag
    assert abs(used_bytes() - before) < SLACK_BYTES // 8, "the device got nothing back"
    p.call("wake")
    assert nbytes_of(LARGE) <= used_bytes() - before < nbytes_of(LARGE) + SLACK_BYTES, "held twice"
    assert d.call("load", "s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert not d.call("has", B, HERE)
    assert d.call("has", A, HERE), "the bytes from before the sleep"
