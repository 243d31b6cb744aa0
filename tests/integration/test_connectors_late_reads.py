"""P4 and the limits of trust: peers that say they let go and do not, and registrations that do not follow the mapping."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_child import Child, ChildError

from torpor.connectors import ConnectorConfig, wire
from torpor.connectors.base import LoadRequest
from torpor.connectors.link import Link
from torpor.connectors.loads import Load
from torpor.connectors.transport import BlockRead
from torpor.errors import TorporError, TransportError
from torpor.testing.kv_engine import KVEngine, missing_package

pytestmark = pytest.mark.integration

A = list(range(100, 110))
B = list(range(200, 210))


class Meeting:
    """An owner that is a process, and a reader in this one."""

    def __init__(self, connector: str, tls: str, folder: Path) -> None:
        self.connector, self._folder = connector, folder
        self._extra: dict[str, Any] = {"ucx_tls": tls} if tls else {}
        self._stack = contextlib.ExitStack()

    def owner(self, connector: str | None = None, **settings: Any) -> Child:
        child = Child(connector or self.connector, "P", "producer", self._folder, extra=dict(self._extra), **settings)
        return self._stack.enter_context(child)

    def reader(self, connector: str | None = None) -> KVEngine:
        extra = self._extra | ({"socket_dir": str(self._folder / "kv")} if self.connector == "ipc" else {})
        config = ConnectorConfig(connector=connector or self.connector, engine_id="D", role="consumer", extra=extra)
        return self._stack.enter_context(KVEngine(config))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(params=["ipc", "nixl", "nixl over tcp", "mooncake"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meeting]:
    connector, _, tls = request.param.partition(" over ")
    if missing := missing_package(connector):
        pytest.skip(missing)
    meeting = Meeting(connector, tls, tmp_path)
    yield meeting
    meeting.close()


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The reader acknowledges a withdrawal, but keeps its import until the event is set."""
    ended = threading.Event()

    def acknowledge(link: Link) -> None:
        link._channel.send(wire.Withdrawn(epoch=str(link.epoch)))
        ended.wait(60)

    monkeypatch.setattr(Link, "_let_go", acknowledge)
    yield ended
    ended.set()


def link_of(d: KVEngine) -> Link:
    return next(iter(d.worker._reader._pullers.values()))._link  # type: ignore[attr-defined,no-any-return]


def read_late(d: KVEngine, link: Link) -> bytes:
    """Reads P's blocks 1 to 3 into ours 4 to 6 without asking anybody; what is in them then."""
    for block in (4, 5, 6):
        d.write_block(block, b"\xee" * len(d.block(block)))
    request = BlockRead(
        local=[4, 5, 6], remote=[1, 2, 3], writing=contextlib.nullcontext, stop=lambda: False, deadline=time.monotonic() + 5
    )
    link._remote.read(request, lambda: None)
    return b"".join(d.block(block) for block in (4, 5, 6))


@pytest.mark.parametrize("meeting", ["nixl", "nixl over tcp", "mooncake"], indirect=True)
def test_p4_a_late_read_kills_nobody_and_yields_no_bytes(meeting: Meeting, liar: threading.Event) -> None:
    p, d = meeting.owner(), meeting.reader()
    late = p.call("prefill", "r", A, [1, 2, 3])
    assert d.load("q", A, late, [4, 5, 6]) == "recving"
    link = link_of(d)
    assert p.call("sleep")["held_bytes"] == 0
    if meeting.connector == "mooncake":
        with pytest.raises(TransportError, match="not registered"):
            read_late(d, link)
    else:
        content = read_late(d, link)
        assert content == bytes(len(content)), "the guard reads as zeros"
    # Through the connector itself the bytes are not believed.
    with pytest.raises(TorporError):
        link._confirm(_load_like(late), 1)
    p.call("wake")
    p.call("prefill", "s", B, [1, 2, 3])
    assert p.process.poll() is None


def _load_like(params: dict[str, Any]) -> Any:
    return Load(LoadRequest(request_id="x", local_block_ids=[], params=params))


def test_a_mapping_that_a_peer_keeps_is_named_by_the_sleep_report(tmp_path: Path, liar: threading.Event) -> None:
    """ipc: whoever acknowledges and lies is found by the kernel's own account (M11)."""
    meeting = Meeting("ipc", "", tmp_path)
    with contextlib.closing(meeting):
        p, d = meeting.owner(), meeting.reader()
        assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        report = p.call("sleep")
        (tag,) = report["tags"]
        assert report["held_bytes"] == tag["unmapped_bytes"]
        assert any(str(os.getpid()) in holder["who"] for holder in tag["holders"]), tag
        liar.set()


def test_p2_a_peer_that_lost_its_connection_but_kept_its_mapping_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting("ipc", "", tmp_path)
    with contextlib.closing(meeting):
        p, d = meeting.owner(withdraw_timeout_s=0.5), meeting.reader()
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
        unfollowed = "torpor.testing.unfollowed:UnfollowedIpc"
        meeting = Meeting("ipc", "", tmp_path)
        with contextlib.closing(meeting):
            p, d = meeting.owner(unfollowed), meeting.reader(unfollowed)
            assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            report = p.call("sleep")
            assert report["held_bytes"] == report["tags"][0]["unmapped_bytes"] > 0
            p.call("wake")
            assert d.load("s", B, p.call("prefill", "s", B, [1, 2, 3]), [4, 5, 6]) == "recving"
            assert not d.has(B, [4, 5, 6])
            assert d.has(A, [4, 5, 6]), "the pages from before the sleep"

    def test_nixl_over_tcp_kills_the_owner(self, tmp_path: Path) -> None:
        pytest.importorskip("nixl_cu13")
        unfollowed = "torpor.testing.unfollowed:UnfollowedNixl"
        meeting = Meeting("nixl", "", tmp_path)
        with contextlib.closing(meeting):
            p, d = meeting.owner(unfollowed), meeting.reader(unfollowed)
            assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            late = p.call("prefill", "late", B, [1, 2, 3])
            p.call("sleep")
            assert d.load("late", B, late, [4, 5, 6], 20) == "failed"
            assert p.death(10) == -signal.SIGSEGV

    def test_mooncake_over_tcp_fails_asleep_and_then_reads_what_is_there_now(self, tmp_path: Path) -> None:
        """TCP goes through the owner's page table: nothing is held, nobody dies, and a hand-off of before the sleep is read from
        the new pages, with success. Over RDMA the old pages are read and held: ``scripts/rdma-vm``."""
        if missing := missing_package("mooncake"):
            pytest.skip(missing)
        unfollowed = "torpor.testing.unfollowed:UnfollowedMooncake"
        meeting = Meeting("mooncake", "", tmp_path)
        with contextlib.closing(meeting):
            p, d = meeting.owner(unfollowed), meeting.reader(unfollowed)
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
    p, d = meeting.owner(), meeting.reader()
    assert d.load("q", A, p.call("prefill", "r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    late = p.call("prefill", "late", B, [1, 2, 3])
    assert p.call("sleep")["held_bytes"] == 0
    assert d.load("late", B, late, [4, 5, 6]) == "failed"
    p.call("wake")
    assert d.load("s", B, p.call("prefill", "s", B, [1, 2, 3]), [4, 5, 6]) == "recving"
    assert d.has(B, [4, 5, 6])
    assert p.process.poll() is None
