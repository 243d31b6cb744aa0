"""What arrives is not trusted: forged blocks and prompts, peers of another kind, garbage. One bad
peer costs others nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_pairs import A, B, Pairs, held_read, needs

from torpor.connectors import wire
from torpor.connectors.channel import Channel
from torpor.connectors.doors import socket_path
from torpor.connectors.geometry import of_offer
from torpor.errors import ConfigurationError, HandshakeError, PeerError
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine


@pytest.fixture(params=["ipc", "nixl", "mooncake"])
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pairs]:
    needs(request.param)
    pairs = Pairs(request.param, tmp_path)
    yield pairs
    pairs.close()


def dial(engine: KVEngine) -> socket.socket:
    """A plain connection to an engine's door."""
    if engine.config.connector == "ipc":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(socket_path(Path(engine.config.extra["socket_dir"]), str(engine.config.engine_id))))
        return sock
    where = engine.worker.get_handshake_metadata() or {}
    return socket.create_connection((where["host"], where["port"]))


class TestForgedRequests:
    @pytest.mark.parametrize(
        "change",
        [
            {"remote_block_ids": [1, 2, 4]},
            {"remote_block_ids": [3, 2, 1]},
            {"remote_block_ids": [1, 2, 8]},
            {"remote_block_ids": [1, 2, (1 << 31) - 1]},
            {"remote_request_id": "another"},
            {"remote_num_tokens": 9},
        ],
    )
    def test_blocks_that_were_not_handed_off_are_not_read(self, pairs: Pairs, change: dict[str, Any]) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        assert d.load("q", A, params | change, [4, 5, 6]) == "failed"
        assert p.step().sending == frozenset(), "the true hand-off is still there"
        assert d.load("q2", A, params, [4, 5, 6]) == "recving"

    @pytest.mark.parametrize(("remote", "local"), [([1, 2, 8], [4, 5, 6]), ([1, 2, 3], [4, 5, 8])])
    def test_a_block_outside_the_cache_is_refused_before_it_is_read(
        self, pairs: Pairs, remote: list[int], local: list[int]
    ) -> None:
        """Behind the last block lies somebody else's memory; the check after the read would come too late."""
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        with held_read(d) as gate:
            gate.open()
            assert d.load("q", A, params | {"remote_block_ids": remote}, local) == "failed"
        assert gate.calls == 0

    def test_the_kv_of_another_prompt_is_not_taken(self, pairs: Pairs) -> None:
        """Or it would sit in the prefix cache under the wrong tokens."""
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        assert d.load("q", B, params, [4, 5, 6]) == "failed"
        assert d.load("q2", [*A, 7, 8], params, [4, 5, 6]) == "recving"

    def test_the_lease_of_another_request_is_not_taken(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        one, two = p.prefill("r", A, [1, 2, 3]), p.prefill("s", B, [4, 5, 6])
        assert d.load("q", A, one | {"torpor": two["torpor"]}, [1, 2, 3]) == "failed"

    def test_an_engine_that_is_not_there_costs_one_request(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        closed = socket.create_server(("127.0.0.1", 0))
        nowhere = params | {"remote_engine_id": "nobody", "remote_port": closed.getsockname()[1]}
        closed.close()
        begun = time.monotonic()
        assert d.load("q", A, nowhere, [4, 5, 6]) == "failed"
        assert time.monotonic() - begun < 3
        assert d.load("q2", A, params, [4, 5, 6]) == "recving"

    @pytest.mark.parametrize("pairs", ["nixl"], indirect=True)
    def test_an_address_with_another_engine_s_name_is_refused(self, pairs: Pairs, caplog: pytest.LogCaptureFixture) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        assert d.load("q", A, params | {"remote_engine_id": "Q"}, [4, 5, 6]) == "failed"
        assert "HandshakeError" in caplog.text
        assert "remote_engine_id" in caplog.text

    def test_too_many_peers_are_refused_and_the_idle_forgotten(self, pairs: Pairs) -> None:
        owners = [pairs.engine(f"P{i}", "producer") for i in range(3)]
        d = pairs.engine("D", "consumer", extra={"max_peers": 2})
        for i, p in enumerate(owners):
            assert d.load(f"q{i}", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert len(d.worker.stats().peers) == 2


class TestPeersOfAnotherKind:
    @pytest.mark.parametrize(
        ("field", "value", "setting"),
        [
            ("model_id", "other@2", "model"),
            ("block_size", 8, "block_size"),
            ("dtype", "float16", "dtype"),
            ("num_layers", 3, "model"),
        ],
    )
    def test_the_field_both_values_and_the_setting_are_named(
        self, pairs: Pairs, caplog: pytest.LogCaptureFixture, field: str, value: Any, setting: str
    ) -> None:
        p = pairs.engine("P", "producer")
        d = pairs.engine("D", "consumer", spec=dataclasses.replace(SMALL_SPEC, **{field: value}))
        params = p.prefill("r", A, [1, 2, 3])
        if field == "block_size":
            params |= {"remote_block_ids": [1, 2]}
        assert d.load("q", A, params, [4, 5, 6]) == "failed"
        told = next(r.getMessage() for r in caplog.records if "HandshakeError" in r.getMessage())
        assert all(part in told for part in (field, repr(value), repr(getattr(SMALL_SPEC, field)), f"same {setting}"))

    def test_caches_of_different_length_go_together(self, pairs: Pairs) -> None:
        p = pairs.engine("P", "producer", spec=dataclasses.replace(SMALL_SPEC, num_blocks=32))
        d = pairs.engine("D", "consumer")
        assert d.load("q", A, p.prefill("r", A, [31, 0, 17]), [4, 5, 6]) == "recving"
        assert d.has(A, [4, 5, 6])

    def test_another_secret_is_refused_and_others_are_served(
        self, pairs: Pairs, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        files = [tmp_path / name for name in ("right", "wrong")]
        for file in files:
            file.write_text(f"the {file.name} secret, long enough")
        p = pairs.engine("P", "producer", secret_file=str(files[0]))
        good = pairs.engine("D", "consumer", secret_file=str(files[0]))
        wrong = pairs.engine("W", "consumer", secret_file=str(files[1]))
        none = pairs.engine("N", "consumer")
        params = p.prefill("r", A, [1, 2, 3])
        for bad in (wrong, none):
            caplog.clear()
            assert bad.load("q", A, params, [4, 5, 6]) == "failed"
            assert "kv_secret_file" in caplog.text
        assert good.load("q", A, params, [4, 5, 6]) == "recving"
        assert good.has(A, [4, 5, 6])
        assert p.sleep().held_bytes == 0

    @pytest.mark.parametrize("pairs", ["ipc"], indirect=True)
    def test_an_engine_id_that_is_taken_is_refused(self, pairs: Pairs) -> None:
        pairs.engine("P", "producer")
        with pytest.raises(ConfigurationError, match="engine_id"):
            pairs.engine("P", "producer")


class TestGarbageAtTheDoor:
    @pytest.mark.parametrize(
        "garbage",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            (1 << 31).to_bytes(4, "big"),
            b"\x00\x00\x00\x05hello",
            b"\x00\x00\x10\x00half",
            b"",
        ],
    )
    def test_it_is_dropped_and_everybody_else_served(self, pairs: Pairs, garbage: bytes) -> None:
        p, d = pairs.pair(extra={"handshake_timeout_s": 0.3})
        socks = [dial(p) for _ in range(3)]
        for sock in socks:
            sock.sendall(garbage)
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        for sock in socks:
            sock.settimeout(3)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
            sock.close()
        begun = time.monotonic()
        assert p.sleep().held_bytes == 0
        assert time.monotonic() - begun < 4

    def test_a_peer_that_talks_nonsense_later_is_dropped(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        channel = Channel(dial(p), "p")
        channel.send(wire.Hello(protocol=wire.PROTOCOL, transport=pairs.connector, secret=False, nonce=b"n" * 32))
        assert channel.receive(5) is not None
        channel.send(wire.ImportRequest(engine_id="X", remote_engine_id="P", spec=wire.to_wire(SMALL_SPEC), heartbeat_s=1.0))
        offer = channel.receive(5)
        assert offer is not None
        assert isinstance(offer[0], wire.Offer)
        channel.send(wire.Withdraw(epoch="x"))
        if pairs.connector == "ipc":
            assert channel.receive(5) is not None  # the descriptors
        with pytest.raises(PeerError):
            channel.receive(5)
        channel.close()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert p.sleep().held_bytes == 0

    def test_p1_a_withdrawal_acknowledged_for_another_epoch_is_none(self, pairs: Pairs) -> None:
        p = pairs.engine("P", "producer", withdraw_timeout_s=0.5)
        channel = Channel(dial(p), "p")
        channel.send(wire.Hello(protocol=wire.PROTOCOL, transport=pairs.connector, secret=False, nonce=b"n" * 32))
        channel.receive(5)
        channel.send(wire.ImportRequest(engine_id="X", remote_engine_id="P", spec=wire.to_wire(SMALL_SPEC), heartbeat_s=5.0))
        assert channel.receive(5) is not None
        boot, _, counter = str(p.worker.epoch()).partition(".")
        channel.send(wire.Withdrawn(epoch=f"{boot}.{int(counter) + 1}"))
        with pytest.raises(PeerError, match="X"):
            p.worker.release_kv_caches()
        channel.send(wire.Withdrawn(epoch=f"{boot}.{counter}"))
        p.worker.release_kv_caches()
        channel.close()

    def test_too_many_connections_are_turned_away(self, pairs: Pairs) -> None:
        p, d = pairs.pair(extra={"max_peers": 4, "handshake_timeout_s": 1.0})
        socks = [dial(p) for _ in range(8)]
        time.sleep(1.6)
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        for sock in socks:
            sock.close()


class TestAnOwnerThatLies:
    def offer(self, **changes: Any) -> wire.Offer:
        fields: dict[str, Any] = {
            "engine_id": "P",
            "epoch": "0" * 16 + ".1",
            "spec": wire.to_wire(SMALL_SPEC),
            "regions": [wire.WireRegion(address=4096, extents=[1 << 20])],
            "layers": [wire.WirePlace(region=0, offset=i * SMALL_SPEC.layer_bytes) for i in range(2)],
            "fence_address": 0,
            "fence_slots": 16,
            "lease_key": b"k" * 32,
        }
        return wire.Offer(**(fields | changes))

    def test_a_true_offer_is_understood(self) -> None:
        assert of_offer(self.offer(), "P").arrays() == [4096 + i * SMALL_SPEC.layer_bytes // 2 for i in range(4)]

    @pytest.mark.parametrize(
        "lie",
        [
            {"layers": [wire.WirePlace(region=0, offset=0)]},
            {"layers": [wire.WirePlace(region=0, offset=0), wire.WirePlace(region=1, offset=0)]},
            {"layers": [wire.WirePlace(region=0, offset=0), wire.WirePlace(region=0, offset=(1 << 20) - 64)]},
            {"regions": [wire.WireRegion(address=4096, extents=[64])]},
            {"regions": []},
            {"fence_slots": 0},
        ],
    )
    def test_layers_outside_what_is_offered_are_refused(self, lie: dict[str, Any]) -> None:
        with pytest.raises(HandshakeError):
            of_offer(self.offer(**lie), "P")

    @pytest.mark.parametrize("epoch", ["", "1", "x" * 16 + ".1", "0" * 16 + ".x"])
    def test_an_epoch_that_is_none_is_refused(self, epoch: str) -> None:
        with pytest.raises(HandshakeError):
            wire.parse_epoch(epoch, "P")
