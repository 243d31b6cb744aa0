"""The control channel's frames: what is garbage, too long, signed wrongly or sent twice ends that connection and nothing else."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from leftovers import no_descriptors_left

from torpor.connectors import wire
from torpor.connectors.channel import Channel, close_descriptors
from torpor.errors import PeerError

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    channels = Channel(left, "left", io_timeout_s=0.3), Channel(right, "right", io_timeout_s=0.3)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    left, right = socket.socketpair()
    channel = Channel(right, "the peer", io_timeout_s=0.3)
    yield left, channel
    left.close()
    channel.close()


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def test_a_message_arrives_as_it_was_sent(pair: Pair) -> None:
    sent = wire.ReadDone(lease=7, commitment=b"12345678")
    payload = pair[0].send(sent)
    assert pair[1].receive(1.0) == (sent, payload)


def test_silence_is_no_error(pair: Pair) -> None:
    assert pair[1].receive(0.0) is None
    pair[0].send(wire.Ping())
    assert pair[1].receive(1.0) is not None


def test_the_end_of_the_stream_is_an_error(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(PeerError, match=r"left|right"):
        pair[1].receive(1.0)
    with pytest.raises(PeerError):
        pair[1].send(wire.Ping())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b"\xff\xff\xff"),
        framed(b""),
        framed(wire.encode(wire.Ping()) + b"x"),
        framed(b"\x81\xa4type\xa5sleep"),  # a message nobody knows
        framed(b"\x82\xa4type\xa4ping\xa1x\x01"),  # an unknown field
        framed(b"\x83\xa4type\xa9read_done\xa5lease\xff\xaacommitment\xc4\x0812345678"),  # a negative lease
        framed(b"\x83\xa4type\xa9read_done\xa5lease\x01\xaacommitment\xc4\x011"),  # a commitment of one byte
    ],
)
def test_garbage_is_refused(raw: tuple[socket.socket, Channel], garbage: bytes) -> None:
    raw[0].sendall(garbage)
    with pytest.raises(PeerError):
        raw[1].receive(1.0)


def test_an_oversized_frame_is_refused_before_it_is_read(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].sendall((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(PeerError, match=str(wire.MAX_FRAME_BYTES)):
        raw[1].receive(1.0)


def test_what_is_too_long_is_not_sent(pair: Pair) -> None:
    left, right = socket.socketpair()
    small = Channel(left, "small", max_frame_bytes=100)
    with pytest.raises(PeerError, match="100"):
        small.send(wire.Refusal(reason="x", text="y" * 4096))
    small.close()
    right.close()


def test_a_frame_that_stops_half_way_does_not_hold_anybody_for_long(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].sendall((100).to_bytes(4, "big") + b"abc")
    begun = time.monotonic()
    with pytest.raises(PeerError, match="middle of a frame"):
        raw[1].receive(20.0)
    assert time.monotonic() - begun < 10


def test_a_peer_that_takes_nothing_does_not_hold_anybody_for_long(raw: tuple[socket.socket, Channel]) -> None:
    message = wire.Refusal(reason="x", text="y" * 4000)

    def send_until_it_fails() -> None:
        for _ in range(1000):
            raw[1].send(message)

    with pytest.raises(PeerError, match="took no message"):
        send_until_it_fails()


def test_descriptors_come_with_their_message_and_do_not_leak(pair: Pair) -> None:
    with no_descriptors_left():
        read, write = os.pipe()
        pair[0].send(wire.Descriptors(count=2), (read, write))
        assert pair[1].receive(1.0) is not None
        got = pair[1].take_descriptors()
        assert len(got) == 2
        os.write(got[1], b"through")
        assert os.read(read, 7) == b"through"
        assert not any(os.get_inheritable(fd) for fd in got)
        close_descriptors([*got, read, write])


def test_descriptors_nobody_took_are_closed_with_the_channel() -> None:
    with no_descriptors_left():
        left, right = (Channel(s, "x") for s in socket.socketpair())
        left.send(wire.Descriptors(count=1), (0,))
        assert right.receive(1.0) is not None
        left.close()
        right.close()


def test_an_abort_wakes_whoever_waits(pair: Pair) -> None:
    ended = []

    def wait() -> None:
        try:
            pair[1].receive(30.0)
        except PeerError:
            ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    pair[1].abort()
    thread.join(5)
    assert ended == [True]


class TestSigned:
    """Once a session has keys."""

    @pytest.fixture
    def pair(self, pair: Pair) -> Pair:
        pair[0].secure(b"k" * 32, b"o" * 32)
        pair[1].secure(b"o" * 32, b"k" * 32)
        return pair

    def test_messages_pass_both_ways(self, pair: Pair) -> None:
        for sender, receiver in (pair, pair[::-1], pair):
            sender.send(wire.Ping())
            assert receiver.receive(1.0) is not None

    def test_an_unsigned_message_is_refused(self, raw: tuple[socket.socket, Channel]) -> None:
        raw[1].secure(b"o" * 32, b"k" * 32)
        raw[0].sendall(framed(wire.encode(wire.Ping())))
        with pytest.raises(PeerError, match="signature"):
            raw[1].receive(1.0)

    @pytest.mark.parametrize("attack", ["twice", "changed", "reflected"])
    def test_a_frame_cannot_be_repeated_changed_or_sent_back(self, attack: str) -> None:
        (a, b), (c, d) = socket.socketpair(), socket.socketpair()
        sender, receiver = Channel(a, "sender"), Channel(d, "receiver")
        sender.secure(b"k" * 32, b"o" * 32)
        receiver.secure(b"o" * 32, b"k" * 32)
        sender.send(wire.ReadDone(lease=5, commitment=b"12345678"))
        frame = b.recv(4096)
        if attack == "twice":
            c.sendall(frame + frame)
            assert receiver.receive(1.0) is not None
        elif attack == "changed":
            c.sendall(frame.replace(b"\x05", b"\x06", 1))
        else:
            b.sendall(frame)
            receiver, sender = sender, receiver
        with pytest.raises(PeerError, match="signature"):
            receiver.receive(1.0)
        for channel in (sender, receiver):
            channel.close()
        b.close()
        c.close()
