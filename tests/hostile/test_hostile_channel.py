"""Owners of every pair transport under attack at their control channel, while a good reader goes on getting the right bytes."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_kit
import pytest
from connector_pairs import A, Pairs, needs
from hostile_peers import (
    GoodReader,
    bad_message,
    dial,
    drain,
    flood,
    framed,
    good_messages,
    open_descriptors,
    pair_of,
    send_all,
    signed,
    signed_session,
)

from torpor.connectors import wire

pytestmark = pytest.mark.timeout(1800 if hostile_kit.SCALE > 1 else 120)
SECRET = b"a secret that both sides know well"


@pytest.fixture(params=["ipc", "nixl", "mooncake"])
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pairs]:
    needs(request.param)
    pairs = Pairs(request.param, tmp_path)
    yield pairs
    pairs.close()


@pytest.fixture(autouse=True)
def no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A thread of ours that ends with an exception has met input it did not expect."""
    deaths: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", deaths.append)
    yield
    assert not deaths, deaths


def check_unharmed(p: Any, good: GoodReader) -> None:
    """The reader is served, and a sleep gets everything back at once: no attacker holds anything."""
    good.read()
    begun = time.monotonic()
    report = p.sleep()
    assert report.held_bytes == 0
    assert time.monotonic() - begun < 3
    p.wake()
    good.read()


def test_spoiled_messages_at_every_point_of_the_conversation(pairs: Pairs) -> None:
    rand = hostile_kit.rng(f"messages {pairs.connector}")
    p, _, good = pair_of(pairs, extra={"handshake_timeout_s": 0.5})
    good.read()
    before = open_descriptors(p)
    for round_ in range(hostile_kit.scaled(150)):
        said = good_messages(pairs.connector)
        at = rand.randrange(len(said))
        frames = [framed(wire.encode(m)) for m in said[:at]] + [bad_message(rand, said[at])]
        send_all(p, frames, timeout_s=0.02)
        hostile_kit.tried(f"spoiled messages, {pairs.connector}")
        if round_ % 10 == 0:
            good.read()
    check_unharmed(p, good)
    settle(lambda: open_descriptors(p) <= before + 2)


def test_conversations_out_of_order_repeated_or_cut(pairs: Pairs) -> None:
    rand = hostile_kit.rng(f"order {pairs.connector}")
    p, _, good = pair_of(pairs, extra={"handshake_timeout_s": 0.5})
    for round_ in range(hostile_kit.scaled(60)):
        frames = [framed(wire.encode(m)) for m in good_messages(pairs.connector)]
        rand.shuffle(frames)
        stream = b"".join(rand.choice((frames, frames * 2, frames[:3])))
        send_all(p, [stream[: rand.randrange(len(stream) + 1)]], timeout_s=0.02)
        hostile_kit.tried(f"conversations out of order, {pairs.connector}")
        if round_ % 20 == 0:
            good.read()
    check_unharmed(p, good)


def test_random_bytes_and_absurd_lengths(pairs: Pairs) -> None:
    rand = hostile_kit.rng(f"bytes {pairs.connector}")
    p, _, good = pair_of(pairs, extra={"handshake_timeout_s": 0.5})
    deep = b"\x82\xa1a" + b"\x91" * 500_000 + b"\xc0\xa4type\xa4ping"
    streams = [framed(deep), framed(b"\xdf\xff\xff\xff\xff"), (1 << 20).to_bytes(4, "big"), b"\xff" * 8, framed(b"")]
    streams += [rand.randbytes(rand.randrange(1, 3000)) for _ in range(hostile_kit.scaled(60))]
    for stream in streams:
        send_all(p, [stream], timeout_s=0.02)
        hostile_kit.tried(f"random streams, {pairs.connector}")
    check_unharmed(p, good)


class TestSigned:
    """With a shared secret: whoever does not know it, and whoever replays, gets nothing and changes nothing."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        file = tmp_path / "secret"
        file.write_bytes(SECRET)
        return {"secret_file": str(file), "extra": {"handshake_timeout_s": 0.5}}

    def test_wrong_macs_replays_and_reordered_frames_end_the_connection(self, pairs: Pairs, settings: dict[str, Any]) -> None:
        rand = hostile_kit.rng(f"macs {pairs.connector}")
        p, _, good = pair_of(pairs, **settings)
        request = good_messages(pairs.connector)[1]
        for _ in range(hostile_kit.scaled(24)):
            with dial(p) as sock:
                keys = signed_session(sock, pairs.connector, SECRET)
                frames = [signed(keys, i, m) for i, m in enumerate((request, wire.Ping(), wire.Ping()))]
                spoiled = hostile_kit.mutated_bytes(rand, frames[0])
                attacks = ([spoiled], [frames[1], frames[0]], [frames[0], frames[0]], [frames[0], frames[2]], [frames[0][:-32]])
                for frame in rand.choice(attacks):
                    with contextlib.suppress(OSError):
                        sock.sendall(frame)
                drain(sock, 0.02)
                hostile_kit.tried(f"sessions with wrong signatures, {pairs.connector}")
        check_unharmed(p, good)

    def test_nobody_without_the_secret_gets_an_offer(self, pairs: Pairs, settings: dict[str, Any]) -> None:
        p, _, good = pair_of(pairs, **settings)
        said = [framed(wire.encode(m)) for m in good_messages(pairs.connector, secret=True)]
        for proof in (b"\0" * 32, b"\xff" * 32, hostile_kit.rng("proof").randbytes(32)):
            answer = send_all(p, [said[0], framed(wire.encode(wire.Proof(mac=proof))), said[1]], timeout_s=0.3)
            assert b"lease_key" not in answer
            assert b"kv_secret_file" in answer
            hostile_kit.tried(f"sessions with wrong signatures, {pairs.connector}")
        check_unharmed(p, good)


@pytest.mark.parametrize("pairs", ["ipc"], indirect=True)
def test_descriptors_nobody_asked_for_are_closed(pairs: Pairs) -> None:
    p, _, good = pair_of(pairs, extra={"handshake_timeout_s": 0.3})
    good.read()
    settle(lambda: True)
    before = open_descriptors()
    hello = framed(wire.encode(good_messages("ipc")[0]))
    for count in (1, 250, 253):
        for _ in range(hostile_kit.scaled(5)):
            with dial(p) as sock, open(os.devnull, "rb") as null:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null.fileno()] * count))]
                with contextlib.suppress(OSError):
                    sock.sendmsg([hello], rights)
                    sock.sendmsg([hello[:1]], rights)
                drain(sock, 0.02)
                hostile_kit.tried("messages with descriptors nobody asked for")
    settle(lambda: open_descriptors() <= before)
    check_unharmed(p, good)


def test_thousands_of_connections_keep_no_good_reader_out(pairs: Pairs) -> None:
    """Neither one that is in already nor one that comes while they come."""
    p, _, good = pair_of(pairs, extra={"handshake_timeout_s": 1.0, "max_peers": 8})
    good.read()
    held: list[socket.socket] = []

    def knock() -> None:
        held.append(dial(p))  # and says nothing
        if len(held) > 300:
            held.pop(0).close()
        time.sleep(0.001)

    begun, wanted = time.monotonic(), hostile_kit.scaled(1000)
    with flood(knock) as count:
        newcomers = 0
        while count() < wanted and time.monotonic() - begun < 60 * hostile_kit.SCALE:
            good.read()
            d = pairs.engine(f"D{newcomers}", "consumer")
            GoodReader(p, d).read()
            d.close()
            newcomers += 1
        hostile_kit.tried(f"connections that say nothing, {pairs.connector}", count())
    for sock in held:
        sock.close()
    assert newcomers >= 1
    check_unharmed(p, good)


def test_slow_peers_are_gone_when_their_time_is_over(pairs: Pairs) -> None:
    """One byte at a time, for ever: the whole handshake has one deadline."""
    p, _, good = pair_of(pairs, extra={"handshake_timeout_s": 0.4})
    hello = framed(wire.encode(good_messages(pairs.connector)[0]))

    def trickle() -> None:
        with dial(p) as sock:
            for byte in hello * 100:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)

    with flood(trickle, threads=4) as count:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            good.read()
        hostile_kit.tried(f"peers that send a byte at a time, {pairs.connector}", count())
        assert count() >= 4, "somebody who says next to nothing was kept"
    check_unharmed(p, good)


def test_peers_that_came_in_and_then_talk_nonsense_hold_nothing(pairs: Pairs) -> None:
    rand = hostile_kit.rng(f"inside {pairs.connector}")
    p, _, good = pair_of(pairs, extra={"handshake_timeout_s": 0.5})
    said = good_messages(pairs.connector)
    for _ in range(hostile_kit.scaled(30)):
        frames = [framed(wire.encode(m)) for m in said[:2]]
        frames += [bad_message(rand, rand.choice(said)) for _ in range(3)]
        send_all(p, frames, timeout_s=0.03)
        hostile_kit.tried(f"nonsense after an offer, {pairs.connector}")
    check_unharmed(p, good)


def test_forged_ends_of_leases_end_none(pairs: Pairs) -> None:
    """ReadDone with every lease number near the true one and with guessed commitments: the hand-off is still there to be read."""
    rand = hostile_kit.rng(f"read_done {pairs.connector}")
    p, d, good = pair_of(pairs)
    params = p.prefill("r", A, [1, 2, 3])
    frames = [framed(wire.encode(m)) for m in good_messages(pairs.connector)[:2]]
    frames += [
        framed(wire.encode(wire.ReadDone(lease=lease, commitment=rand.randbytes(8)))) for lease in range(hostile_kit.scaled(300))
    ]
    send_all(p, frames, timeout_s=0.3)
    hostile_kit.tried(f"forged ends of leases, {pairs.connector}", len(frames) - 2)
    assert p.step().sending == frozenset()
    assert d.load("q", A, params, [4, 5, 6]) == "recving"
    assert d.has(A, [4, 5, 6])
    check_unharmed(p, good)


def settle(holds: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"it never came true ({open_descriptors()} descriptors are open)"
        time.sleep(0.01)
