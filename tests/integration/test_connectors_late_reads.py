"""P4 and the limits of trust: peers that say they let go and do not, and registrations that do not follow the mapping."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_child import Child, ChildError
from kv_meeting import (
    UNFOLLOWED_IPC,
    UNFOLLOWED_MOONCAKE,
    UNFOLLOWED_NIXL,
    Meeting,
    confirm,
    link_of,
    lying_readers,
    read_unasked,
)

from torpor.errors import TorporError, TransportError
from torpor.testing.kv_engine import KVEngine

pytestmark = pytest.mark.integration

A = list(range(100, 110))
B = list(range(200, 210))


@pytest.fixture(params=["ipc", "nixl", "nixl over tcp", "mooncake"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meeting]:
    with contextlib.closing(Meeting(request.param, tmp_path)) as meeting:
        yield meeting


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    with lying_readers(monkeypatch) as ended:
        yield ended


def owner(meeting: Meeting, kind: str = "", **settings: Any) -> Child:
    return meeting.child("P", "producer", kind=kind, **settings)


def reader(meeting: Meeting, kind: str = "") -> KVEngine:
    return meeting.here("D", "consumer", kind=kind)


@pytest.mark.parametrize("meeting", ["nixl", "nixl over tcp", "mooncake"], indirect=True)
def test_p4_a_late_read_kills_nobody_and_yields_no_bytes(meeting: Meeting, liar: threading.Event) -> None:
    p, d = owner(meeting), reader(meeting)
    late = p.call("prefill", "r", A, [1, 2, 3])
    assert d.load("q", A, late, [4, 5, 6]) == "recving"
    link = link_of(d)
    assert p.call("sleep")["held_bytes"] == 0
    if meeting.connector == "mooncake":
        with pytest.raises(TransportError, match="not registered"):
            read_unasked(d, link, [1, 2, 3], [4, 5, 6])
    else:
        content = read_unasked(d, link, [1, 2, 3], [4, 5, 6])
        assert content == bytes(len(content)), "the guard reads as zeros"
    # Through the connector itself the bytes are not believed.
    with pytest.raises(TorporError):
        confirm(link, late, [4, 5, 6])
    p.call("wake")
    p.call("prefill", "s", B, [1, 2, 3])
    assert p.process.poll() is None


def test_a_mapping_that_a_peer_keeps_is_named_by_the_sleep_report(tmp_path: Path, liar: threading.Event) -> None:
    """ipc: whoever acknowledges and lies is found by the kernel's own account (M11)."""
    with contextlib.closing(Meeting("ipc", tmp_path)) as meeting:
        p, d = owner(meeting), reader(meeting)
        assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        report = p.call("sleep")
        (tag,) = report["tags"]
        assert report["held_bytes"] == tag["unmapped_bytes"]
        assert any(str(os.getpid()) in holder["who"] for holder in tag["holders"]), tag
        liar.set()


def test_p2_a_peer_that_lost_its_connection_but_kept_its_mapping_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Meeting("ipc", tmp_path)) as meeting:
        p, d = owner(meeting, withdraw_timeout_s=0.5), reader(meeting)
        assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        link = link_of(d)
        close, link._remote.close = link._remote.close, lambda: True  # type: ignore[method-assign]
        link._channel.abort()
        with pytest.raises(ChildError, match=rf"PeerError: D \(pid {os.getpid()}\)"):
            p.call("sleep")
        close()
        assert p.call("sleep")["held_bytes"] == 0


class TestUnfollowed:
    """The fault of the seeds, with connectors that say they follow the mapping and do not."""

    def test_ipc_reads_old_bytes_with_success_and_holds_the_memory(self, tmp_path: Path) -> None:
        kind = UNFOLLOWED_IPC
        with contextlib.closing(Meeting("ipc", tmp_path)) as meeting:
            p, d = owner(meeting, kind), reader(meeting, kind)
            assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            report = p.call("sleep")
            assert report["held_bytes"] == report["tags"][0]["unmapped_bytes"] > 0
            p.call("wake")
            assert d.load("s", B, p.call("prefill", "s", B, [1, 2, 3]), [4, 5, 6]) == "recving"
            assert not d.has(B, [4, 5, 6])
            assert d.has(A, [4, 5, 6]), "the pages from before the sleep"

    def test_nixl_over_tcp_kills_the_owner(self, tmp_path: Path) -> None:
        kind = UNFOLLOWED_NIXL
        with contextlib.closing(Meeting("nixl", tmp_path)) as meeting:
            p, d = owner(meeting, kind), reader(meeting, kind)
            assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            late = p.call("prefill", "late", B, [1, 2, 3])
            p.call("sleep")
            assert d.load("late", B, late, [4, 5, 6], 20) == "failed"
            assert p.death(10) == -signal.SIGSEGV

    def test_mooncake_over_tcp_fails_asleep_and_then_reads_what_is_there_now(self, tmp_path: Path) -> None:
        """TCP goes through the owner's page table: nothing is held, nobody dies, and a hand-off of before the sleep is read from
        the new pages, with success. Over RDMA the old pages are read and held: ``scripts/rdma-vm``."""
        kind = UNFOLLOWED_MOONCAKE
        with contextlib.closing(Meeting("mooncake", tmp_path)) as meeting:
            p, d = owner(meeting, kind), reader(meeting, kind)
            assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            late, later = p.call("prefill", "late", B, [1, 2, 3]), p.call("prefill", "later", B, [1, 2, 3])
            p.call("sleep")
            assert d.load("late", B, late, [4, 5, 6]) == "failed"
            assert p.process.poll() is None
            p.call("wake")
            assert d.load("later", B, later, [4, 5, 6]) == "recving"
            assert not d.has(B, [4, 5, 6]), "wrong bytes, and success"


def test_the_reader_outlives_all_that(meeting: Meeting) -> None:
    """Followed, with the same calls: right bytes, nothing held."""
    p, d = owner(meeting), reader(meeting)
    assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    late = p.call("prefill", "late", B, [1, 2, 3])
    assert p.call("sleep")["held_bytes"] == 0
    assert d.load("late", B, late, [4, 5, 6]) == "failed"
    p.call("wake")
    assert d.load("s", B, p.call("prefill", "s", B, [1, 2, 3]), [4, 5, 6]) == "recving"
    assert d.has(B, [4, 5, 6])
    assert p.process.poll() is None
