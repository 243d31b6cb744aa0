"""Reads of an owner that sleeps (P4)."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest
from connector_kit import HERE, THERE, A, B
from kv_meeting import UNFOLLOWED_NIXL, Meeting, confirm, link_of, read_unasked

from torpor.errors import StaleEpochError, TorporError

pytestmark = pytest.mark.gpu


def test_p4_a_late_read_kills_nobody_and_its_old_bytes_are_refused(ipc: Meeting, liar: threading.Event) -> None:
    """Device memory has no guard: the reader's own import stays valid and shows what was there. The epoch refuses it (P3)."""
    p, d = ipc.child("P", "producer"), ipc.here("D", "consumer")
    late = p.call("prefill", "r", A, THERE)
    assert d.load("q", A, late, HERE) == "recving"
    link = link_of(d)
    p.call("sleep")
    read_unasked(d, link, THERE, HERE)
    assert d.has(A, HERE), "the old bytes"
    with pytest.raises(StaleEpochError):
        confirm(link, late, HERE)
    p.call("wake")
    with pytest.raises(StaleEpochError):
        confirm(link, late, HERE)
    assert p.process.poll() is None
    liar.set()


def test_p4_a_late_read_over_nixl_kills_nobody(nixl: Meeting, liar: threading.Event) -> None:
    """The owner's range is a hole. UCX would take its addresses for the host's and die of a fault there: the agent is gone."""
    p, d = nixl.child("P", "producer"), nixl.here("D", "consumer")
    late = p.call("prefill", "r", A, THERE)
    assert d.load("q", A, late, HERE) == "recving"
    link = link_of(d)
    assert p.call("sleep")["held_bytes"] == 0
    with contextlib.suppress(TorporError):
        read_unasked(d, link, THERE, HERE)
    with pytest.raises(TorporError):
        confirm(link, late, HERE)
    assert p.process.poll() is None
    p.call("wake")
    liar.set()
    assert d.load("s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)


def test_an_owner_whose_nixl_registration_does_not_follow_dies(nixl: Meeting) -> None:
    p = nixl.child("P", "producer", kind=UNFOLLOWED_NIXL)
    d = nixl.child("D", "consumer", kind=UNFOLLOWED_NIXL, extra={"read_timeout_s": 5.0})
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    late = p.call("prefill", "late", B, THERE)
    p.call("sleep")
    assert d.call("load", "late", B, late, HERE) == "failed"
    assert p.death(10) == -signal.SIGSEGV
