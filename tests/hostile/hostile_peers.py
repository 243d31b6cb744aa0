"""Peers of the control channel that do not play by its rules: raw frames, recorded good sessions to spoil, and flooders."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hostile_kit  # (the path of the modules below)
import msgspec
from connector_pairs import Pairs

from torpor.connectors import auth, wire
from torpor.connectors.doors import socket_path
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine

NONCE = b"n" * wire.NONCE_BYTES


def dial(engine: KVEngine) -> socket.socket:
    """A plain connection to an engine's door."""
    if engine.config.connector == "ipc":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        try:
            sock.connect(str(socket_path(Path(engine.config.extra["socket_dir"]), str(engine.config.engine_id))))
        except OSError:
            sock.close()
            raise
        return sock
    where = engine.worker.get_handshake_metadata() or {}
    return socket.create_connection((where["host"], where["port"]), timeout=5)


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def good_messages(transport: str, secret: bool = False) -> list[wire.AnyMessage]:
    """What a reader says to engine P, in order."""
    spec = wire.to_wire(SMALL_SPEC)
    return [
        wire.Hello(protocol=wire.PROTOCOL, transport=transport, secret=secret, nonce=NONCE),
        wire.ImportRequest(engine_id="X", remote_engine_id="P", spec=spec, heartbeat_s=1.0),
        wire.Ping(),
        wire.ReadDone(lease=1, commitment=b"12345678"),
        wire.Withdrawn(epoch="0" * 16 + ".1"),
        wire.Goodbye(),
    ]


def bad_message(rand: random.Random, message: wire.AnyMessage) -> bytes:
    """A message's frame with its fields or its bytes spoiled."""
    if rand.random() < 0.6:
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        with contextlib.suppress(OverflowError, UnicodeEncodeError, TypeError, RecursionError):
            return framed(msgspec.msgpack.encode(hostile_kit.mutated_object(rand, fields)))
    payload = hostile_kit.mutated_bytes(rand, wire.encode(message))
    return payload if rand.random() < 0.3 else framed(payload)


def drain(sock: socket.socket, timeout_s: float) -> bytes:
    """What the owner answers, until it is silent or gone."""
    sock.settimeout(timeout_s)
    data = b""
    with contextlib.suppress(OSError):
        while (part := sock.recv(1 << 16)) and len(data) < 1 << 20:
            data += part
    return data


def signed_session(sock: socket.socket, transport: str, secret: bytes) -> auth.SessionKeys:
    """Greets as somebody who knows the secret; the keys of what follows."""
    hello = wire.encode(wire.Hello(protocol=wire.PROTOCOL, transport=transport, secret=True, nonce=NONCE))
    sock.sendall(framed(hello))
    challenge = one_frame(sock)
    digest = auth.transcript(hello, challenge)
    sock.sendall(framed(wire.encode(wire.Proof(mac=auth.prove(secret, "reader", digest)))))
    assert isinstance(wire.decode(one_frame(sock)), wire.Accept)
    return auth.session_keys(secret, digest)


def one_frame(sock: socket.socket) -> bytes:
    length = int.from_bytes(exactly(sock, 4), "big")
    return exactly(sock, length)


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("the owner closed the connection")
        data += part
    return data


def signed(keys: auth.SessionKeys, sequence: int, message: wire.AnyMessage) -> bytes:
    payload = wire.encode(message)
    return framed(payload + auth.frame_mac(keys.reader, sequence, payload))


class GoodReader:
    """Takes hand-offs of P over and over while others misbehave, and looks at every byte. ``close`` raises what went wrong."""

    def __init__(self, p: KVEngine, d: KVEngine) -> None:
        self._p, self._d = p, d
        self.reads = 0
        self._serial = 0

    def read(self) -> None:
        """One hand-off, whose bytes must be the right ones; that the load fails is a fault, too."""
        self._serial += 1
        prompt = [self._serial * 16 + i for i in range(10)]
        params = self._p.prefill(f"good{self._serial}", prompt, [1, 2, 3])
        ended = self._d.load(f"read{self._serial}", prompt, params, [4, 5, 6], timeout_s=20)
        assert ended == "recving", f"read {self._serial} {ended}"
        assert self._d.has(prompt, [4, 5, 6]), f"read {self._serial} brought other bytes"
        assert self._p.wait(f"good{self._serial}", 20) == "sending"
        self.reads += 1
        hostile_kit.tried(f"good reads meanwhile, {self._p.config.connector}")


@contextlib.contextmanager
def flood(attack: Callable[[], None], threads: int = 1) -> Iterator[Callable[[], int]]:
    """``attack`` again and again on other threads; how often so far. What an attacker meets is its own affair."""
    stop = threading.Event()
    counts = [0] * threads

    def run(index: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                attack()
            counts[index] += 1

    attackers = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(threads)]
    for attacker in attackers:
        attacker.start()
    try:
        yield lambda: sum(counts)
    finally:
        stop.set()
        for attacker in attackers:
            attacker.join(10)


def open_descriptors(engine: KVEngine | None = None) -> int:
    """This process's; with ``engine``, without TCP connections that do not lead to its door: a transport's own for the bytes, of
    which Mooncake opens more the more of a read's pieces happen to be on the way at once."""
    others = set() if engine is None or engine.config.connector == "ipc" else connections_beside(_door_port(engine))
    return len([target for target in map(_target, os.listdir("/proc/self/fd")) if target not in others])


def connections_beside(port: int) -> set[str]:
    """Every established TCP connection with neither end at this port, as /proc/self/fd names its socket."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            ends = {int(end.rpartition(":")[2], 16) for end in (local, remote)}
            if state == "01" and port not in ends:
                found.add(f"socket:[{rest[5]}]")
    return found


def _door_port(engine: KVEngine) -> int:
    return int((engine.worker.get_handshake_metadata() or {})["port"])


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the one that lists them, or one closed since
        return ""


def pair_of(pairs: Pairs, **settings: Any) -> tuple[KVEngine, KVEngine, GoodReader]:
    p, d = pairs.pair(**settings)
    return p, d, GoodReader(p, d)


def send_all(engine: KVEngine, frames: Sequence[bytes], timeout_s: float = 0.05) -> bytes:
    """One connection that says all this; what was answered."""
    with dial(engine) as sock:
        with contextlib.suppress(OSError):
            for frame in frames:
                sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)
        return drain(sock, timeout_s)
