"""Who may talk: the greeting of both sides, with and without a shared secret, and the check of addresses and users."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from connector_pairs import WAIT_S, Background

from torpor.connectors import auth, wire
from torpor.connectors.channel import Channel
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.doors import (
    Credentials,
    TcpDoor,
    UnixDoor,
    check_same_user,
    dial_tcp,
    dial_unix,
    make_private_folder,
    peer_credentials,
    socket_path,
    start_time,
)
from torpor.connectors.handshake import Refused, greet, receive_greeting, refuse
from torpor.connectors.ipc import IpcConnector
from torpor.connectors.nixl import NixlConnector
from torpor.errors import ConfigurationError, HandshakeError, PeerError, TorporError
from torpor.testing.kv_engine import SMALL_SPEC

SECRET = b"a secret of thirty-two bytes ...."


def knock_until_full(path: Path) -> list[socket.socket]:
    """Connections that nobody has taken, as many as the listener's queue holds."""
    knocking = []
    while True:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            sock.close()
            return knocking
        knocking.append(sock)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    channels = Channel(left, "the owner", io_timeout_s=1.0), Channel(right, "the reader", io_timeout_s=1.0)
    yield channels
    for channel in channels:
        channel.close()


def meet(ends: tuple[Channel, Channel], reader: bytes | None, owner: bytes | None, transports: tuple[str, str] = ("ipc", "ipc")):
    """Runs both sides; what each raised."""
    raised: dict[str, TorporError | None] = {"reader": None, "owner": None}
    deadline = time.monotonic() + 2

    def own() -> None:
        try:
            receive_greeting(ends[1], owner, transports[1], deadline)
        except TorporError as error:
            raised["owner"] = error
            if isinstance(error, Refused):
                refuse(ends[1], error)
            ends[1].abort()

    thread = threading.Thread(target=own)
    thread.start()
    try:
        greet(ends[0], reader, transports[0], deadline)
    except TorporError as error:
        raised["reader"] = error
        ends[0].abort()
    thread.join(5)
    return raised["reader"], raised["owner"]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_peers_of_one_mind_meet(ends: tuple[Channel, Channel], secret: bytes | None) -> None:
    assert meet(ends, secret, secret) == (None, None)
    ends[0].send(wire.Ping())
    assert ends[1].receive(1.0) is not None
    ends[1].send(wire.Withdraw(epoch="0" * 16 + ".1"))
    assert ends[0].receive(1.0) is not None


def test_another_secret_is_refused_by_the_name_of_the_setting(ends: tuple[Channel, Channel]) -> None:
    reader, owner = meet(ends, SECRET, b"b" + SECRET[1:])
    assert isinstance(owner, Refused)
    assert isinstance(reader, HandshakeError)
    assert "kv_secret_file" in str(reader)


@pytest.mark.parametrize(("reader", "owner"), [(SECRET, None), (None, SECRET)])
def test_nobody_falls_back_to_no_secret(ends: tuple[Channel, Channel], reader: bytes | None, owner: bytes | None) -> None:
    errors = meet(ends, reader, owner)
    assert any(isinstance(error, HandshakeError) and "kv_secret_file" in str(error) for error in errors)
    assert None not in errors


def test_an_owner_that_does_not_prove_the_secret_is_left(ends: tuple[Channel, Channel]) -> None:
    """It answers every step correctly but the one that needs the secret."""

    def impostor() -> None:
        ends[1].receive(2.0)
        ends[1].send(wire.Challenge(protocol=wire.PROTOCOL, secret=True, nonce=b"n" * 32))
        ends[1].receive(2.0)
        ends[1].send(wire.Accept(mac=b"m" * 32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(HandshakeError, match="did not prove"):
        greet(ends[0], SECRET, "ipc", time.monotonic() + 2)
    thread.join(5)


def test_a_proof_sent_back_is_no_proof(ends: tuple[Channel, Channel]) -> None:
    """The owner's proof is over another role: an impostor cannot use the reader's own."""

    def mirror() -> None:
        ends[1].receive(2.0)
        ends[1].send(wire.Challenge(protocol=wire.PROTOCOL, secret=True, nonce=b"n" * 32))
        proof = ends[1].receive(2.0)
        assert proof is not None
        ends[1].send(wire.Accept(mac=proof[0].mac))

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(HandshakeError, match="did not prove"):
        greet(ends[0], SECRET, "ipc", time.monotonic() + 2)
    thread.join(5)


def test_another_transport_is_refused(ends: tuple[Channel, Channel]) -> None:
    reader, _ = meet(ends, None, None, ("ipc", "nixl"))
    assert isinstance(reader, HandshakeError)
    assert "kv_connector" in str(reader)


def test_another_protocol_version_is_refused(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(wire.Hello(protocol=wire.PROTOCOL + 1, transport="ipc", secret=False, nonce=b"n" * 32))
    with pytest.raises(Refused, match="version"):
        receive_greeting(ends[1], None, "ipc", time.monotonic() + 2)


def test_a_message_out_of_turn_is_refused(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(wire.Goodbye())
    with pytest.raises(PeerError, match="Goodbye"):
        receive_greeting(ends[1], None, "ipc", time.monotonic() + 2)


def test_silence_is_refused_in_time(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(PeerError, match="in time"):
        receive_greeting(ends[1], None, "ipc", time.monotonic() + 0.1)


class TestSecretFile:
    def test_it_is_read_without_its_newline(self, tmp_path: Path) -> None:
        file = tmp_path / "secret"
        file.write_bytes(SECRET + b"\n")
        assert auth.load_secret(str(file)) == SECRET

    @pytest.mark.parametrize("content", [None, b"", b"short"])
    def test_a_missing_or_short_one_is_refused(self, tmp_path: Path, content: bytes | None) -> None:
        file = tmp_path / "secret"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigurationError, match="kv_secret_file"):
            auth.load_secret(str(file))

    @pytest.mark.parametrize("host", ["10.0.0.1", "example.test", "fd00::1"])
    def test_it_is_required_off_loopback(self, host: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            NixlConnector.create_worker(ConnectorConfig(connector="nixl", engine_id="P", host=host), SMALL_SPEC)
        assert caught.value.fields["setting"] == "kv_secret_file"
        auth.check_host(host, SECRET)

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
    def test_loopback_needs_none(self, host: str) -> None:
        auth.check_host(host, None)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
    def test_an_address_peers_cannot_use_is_refused(self, host: str) -> None:
        with pytest.raises(ConfigurationError, match="kv_host"):
            auth.check_host(host, SECRET)

    def test_ipc_uses_it_too(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="kv_secret_file"):
            IpcConnector.create_worker(
                ConnectorConfig(connector="ipc", engine_id="P", secret_file=str(tmp_path / "no")), SMALL_SPEC
            )


class TestUnixDoor:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return socket_path(tmp_path / "sockets", "P")

    def test_it_is_for_this_user_alone(self, path: Path) -> None:
        door = UnixDoor(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        door.close()
        door.close()
        assert not path.exists()

    def test_another_user_is_turned_away_before_a_byte_is_sent(self, path: Path) -> None:
        asked: list[Credentials] = []

        def somebody_else(credentials: Credentials) -> None:
            asked.append(credentials)
            check_same_user(Credentials(credentials.pid, credentials.uid + 1))

        door = UnixDoor(path, check=somebody_else)
        sock = dial_unix(path, "P", 1.0)
        assert door.accept(1.0) is None
        assert [c.pid for c in asked] == [os.getpid()]
        assert sock.recv(1) == b""
        sock.close()
        door.close()

    def test_the_reader_checks_the_owner_too(self, path: Path) -> None:
        def refuse_everybody(credentials: Credentials) -> None:
            check_same_user(Credentials(credentials.pid, credentials.uid + 1))

        door = UnixDoor(path)
        with pytest.raises(HandshakeError, match="uid"):
            dial_unix(path, "P", 1.0, check=refuse_everybody)
        door.close()

    def test_what_a_dead_engine_left_is_replaced(self, path: Path) -> None:
        make_private_folder(path.parent)
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(path))
        dead.close()
        door = UnixDoor(path)
        dial_unix(path, "P", 1.0).close()
        door.close()

    def test_what_killed_engines_left_is_swept_but_nothing_young_or_living(self, path: Path) -> None:
        make_private_folder(path.parent)
        others = [path.with_name(f"{name}.sock") for name in ("stale", "young", "living")]
        sockets = [socket.socket(socket.AF_UNIX) for _ in others]
        for sock, other in zip(sockets, others, strict=True):
            sock.bind(str(other))
        sockets[2].listen()
        for other in (others[0], others[2]):
            os.utime(other, (0, 0))
        sockets[0].close()
        sockets[1].close()
        UnixDoor(path).close()
        assert [other.exists() for other in others] == [False, True, True]
        sockets[2].close()

    def test_a_living_one_is_not(self, path: Path) -> None:
        door = UnixDoor(path)
        with pytest.raises(ConfigurationError) as caught:
            UnixDoor(path)
        assert caught.value.fields["setting"] == "engine_id"
        door.close()

    @pytest.mark.parametrize("folder", ["/proc/nope", "/dev/null/x"])
    def test_a_folder_that_cannot_be_made_is_a_wrong_setting(self, folder: str) -> None:
        with pytest.raises(ConfigurationError, match="cannot be made") as caught:
            UnixDoor(Path(folder) / "a.sock")
        assert caught.value.fields["setting"] == "socket_dir"

    def test_a_socket_that_cannot_be_made_is_a_wrong_setting(self, path: Path) -> None:
        with pytest.raises(ConfigurationError, match="cannot listen at") as caught:
            UnixDoor(path.with_name("a" * 200))
        assert caught.value.fields["setting"] == "socket_dir"

    def test_nobody_there_is_a_peer_error(self, path: Path) -> None:
        with pytest.raises(PeerError, match="socket_dir"):
            dial_unix(path, "engine 'P'", 1.0)

    def test_a_queue_that_is_full_is_waited_for(self, path: Path) -> None:
        door, knocking = UnixDoor(path), knock_until_full(path)
        waiting = Background(lambda: dial_unix(path, "engine 'P'", WAIT_S))
        assert not waiting.ended_within(0.1)
        taken = [door.accept(1.0) for _ in knocking]  # somebody takes them after all
        waiting.result().close()
        for sock in [*knocking, *(came[0] for came in taken if came is not None)]:
            sock.close()
        door.close()

    def test_a_queue_that_stays_full_is_a_peer_error(self, path: Path) -> None:
        door, knocking = UnixDoor(path), knock_until_full(path)
        with pytest.raises(PeerError, match=r"engine 'P' has not taken a connection within 0.05 s \(connect_timeout_s\)"):
            dial_unix(path, "engine 'P'", 0.05)
        for sock in knocking:
            sock.close()
        door.close()

    def test_a_folder_others_can_enter_is_refused(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        with pytest.raises(ConfigurationError, match="socket_dir"):
            make_private_folder(tmp_path)

    def test_a_link_in_the_folder_s_place_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(ConfigurationError, match="socket_dir"):
            make_private_folder(tmp_path / "link")

    def test_a_path_that_is_too_long_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="107"):
            socket_path(tmp_path / ("x" * 100), "P")

    def test_an_engine_id_cannot_name_a_path(self, tmp_path: Path) -> None:
        assert socket_path(tmp_path, "../../etc/passwd").parent == tmp_path

    def test_a_process_is_known_by_its_start(self) -> None:
        left, right = socket.socketpair()
        found = peer_credentials(left)
        assert (found.pid, found.uid, found.started) == (os.getpid(), os.geteuid(), start_time(os.getpid()))
        assert start_time(1 << 30) is None
        left.close()
        right.close()


class TestTcpDoor:
    def test_a_port_in_use_names_the_setting(self) -> None:
        door = TcpDoor("127.0.0.1", 0)
        with pytest.raises(ConfigurationError) as caught:
            TcpDoor("127.0.0.1", door.port)
        assert caught.value.fields == {"setting": "kv_port", "value": door.port}
        door.close()

    def test_nobody_there_is_a_peer_error(self) -> None:
        door = TcpDoor("127.0.0.1", 0)
        port = door.port
        door.close()
        with pytest.raises(PeerError, match=str(port)):
            dial_tcp("127.0.0.1", port, "engine 'P'", 1.0)

    def test_a_name_that_is_none_is_a_peer_error(self) -> None:
        with pytest.raises(PeerError):
            dial_tcp("a" * 70 + ".invalid", 1, "engine 'P'", 1.0)


def test_connectors_check_their_options() -> None:
    make: list[Callable[[ConnectorConfig], object]] = [
        lambda c: IpcConnector.create_worker(c, SMALL_SPEC),
        lambda c: NixlConnector.create_worker(c, SMALL_SPEC),
    ]
    for create in make:
        for extra in (
            {"no_such_option": 1},
            {"read_timeout_s": -1},
            {"read_timeout_s": "1"},
            {"max_peers": True},
            {"max_peers": 0},
        ):
            with pytest.raises(ConfigurationError, match=next(iter(extra))):
                create(ConnectorConfig(connector="x", engine_id="P", extra=extra))
        with pytest.raises(ConfigurationError, match="kv_role"):
            create(ConnectorConfig(connector="x", engine_id="P", role="prefill"))  # type: ignore[arg-type]
