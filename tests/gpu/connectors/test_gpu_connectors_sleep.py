"""Engines that sleep under a read (P1, P2)."""

from __future__ import annotations

import os
import time

import pytest
from connector_kit import HERE, THERE, WAIT_S, A, B
from connector_pairs import held_read
from kv_child import ChildError
from kv_meeting import Meeting, link_of

pytestmark = pytest.mark.gpu


def test_p2_nothing_is_unmapped_while_a_peer_reads(ipc: Meeting) -> None:
    p, d = ipc.child("P", "producer"), ipc.here("D", "consumer")
    params = p.call("prefill", "r", A, THERE)
    with held_read(d) as gate:
        d.begin_load("q", A, params, HERE)
        assert gate.reached.wait(WAIT_S)
        p.begin("sleep")
        with pytest.raises(TimeoutError):
            p.finish(0.5)
        gate.open()
        assert p.finish()["held_bytes"] == 0
    assert d.wait("q") == "failed"
    p.call("wake")
    assert d.load("s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)


def test_p2_a_read_that_does_not_end_is_met_by_the_deadline_by_name(ipc: Meeting) -> None:
    p, d = ipc.child("P", "producer", withdraw_timeout_s=0.5), ipc.here("D", "consumer")
    params = p.call("prefill", "r", A, THERE)
    with held_read(d) as gate:
        d.begin_load("q", A, params, HERE)
        assert gate.reached.wait(WAIT_S)
        begun = time.monotonic()
        with pytest.raises(ChildError, match=rf"PeerError: D \(pid {os.getpid()}\).*withdraw_timeout_s"):
            p.call("sleep")
        assert time.monotonic() - begun < 3
        gate.open()
    assert d.wait("q") == "failed"
    assert d.load("s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)
    assert p.call("sleep")["held_bytes"] == 0


def test_p2_a_lost_connection_does_not_hide_what_the_peer_keeps(ipc: Meeting) -> None:
    """Device memory has no inode: the fence that goes with an import tells that it is still there, and that it is gone."""
    p, d = ipc.child("P", "producer", withdraw_timeout_s=0.5), ipc.here("D", "consumer")
    assert d.load("q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    link = link_of(d)
    close, link._remote.close = link._remote.close, lambda: True  # type: ignore[method-assign]
    link._channel.abort()
    with pytest.raises(ChildError, match=rf"PeerError: D \(pid {os.getpid()}\)"):
        p.call("sleep")
    close()
    assert p.call("sleep")["held_bytes"] == 0


def test_p1_an_old_epoch_is_not_read(meeting: Meeting) -> None:
    p, d = meeting.child("P", "producer"), meeting.child("D", "consumer")
    late = p.call("prefill", "late", A, THERE)
    assert p.call("sleep")["held_bytes"] == 0
    before = d.call("block_sums")
    assert d.call("load", "asleep", A, late, HERE) == "failed"
    p.call("wake")
    new = p.call("prefill", "new", B, THERE)
    assert d.call("load", "late", A, late | {"remote_port": new["remote_port"]}, HERE) == "failed"
    assert d.call("block_sums") == before
    assert d.call("load", "new", B, new, HERE) == "recving"
    assert d.call("has", B, HERE)
