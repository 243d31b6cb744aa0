"""``mooncake``: bad settings, forged metadata, engines that are handed on, partial failures, and reads that do not end."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from connector_pairs import WAIT_S, A, B, Pairs, needs

from torpor.connectors import ConnectorConfig, get_connector, mooncake_engine, mooncake_reads
from torpor.connectors.mooncake import MooncakeConnector, MooncakeTransport
from torpor.connectors.mooncake_engine import Engine, Flight, check_protocol, load_package
from torpor.connectors.mooncake_reads import Handle, decode_handle
from torpor.connectors.transport import Publication
from torpor.errors import ConfigurationError, ConnectorError, HandshakeError, TransportError
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Pairs]:
    needs("mooncake")
    pairs = Pairs("mooncake", tmp_path)
    yield pairs
    pairs.close()


def transport_of(engine: KVEngine) -> MooncakeTransport:
    transport = engine.worker._transport  # type: ignore[attr-defined]
    assert isinstance(transport, MooncakeTransport)
    return transport


class TestSettings:
    def test_it_declares_support_and_a_guard(self) -> None:
        found = get_connector("mooncake")
        assert found is MooncakeConnector
        assert found.supports_sleep_mode
        assert found.guarded

    def test_without_its_package_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mooncake.engine", None)
        monkeypatch.setitem(sys.modules, "mooncake", None)
        with pytest.raises(ConnectorError, match=r"pip install 'torpor\[mooncake\]'.*libibverbs1"):
            load_package()
        with pytest.raises(ConnectorError, match="mooncake"):
            KVEngine(ConnectorConfig(connector="mooncake"))

    @pytest.mark.parametrize(
        ("extra", "setting"),
        [
            ({"protocol": "carrier"}, "protocol"),
            ({"protocol": 3}, "protocol"),
            ({"protocol": "tcp", "device_name": "mlx5_0"}, "device_name"),
            ({"ucx_tls": "tcp"}, "ucx_tls"),
            ({"staging_bytes": 0}, "staging_bytes"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name(self, extra: dict[str, Any], setting: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            MooncakeConnector.create_worker(ConnectorConfig(connector="mooncake", engine_id="P", extra=extra), SMALL_SPEC)
        assert caught.value.fields["setting"] == setting

    def test_rdma_without_a_device_is_refused_and_not_tcp_in_silence(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(mooncake_engine, "RDMA_DEVICES", tmp_path / "none")
        with pytest.raises(ConfigurationError, match="no RDMA device") as caught:
            check_protocol("rdma", None)
        assert caught.value.fields["setting"] == "protocol"
        (tmp_path / "some" / "rxe0").mkdir(parents=True)
        monkeypatch.setattr(mooncake_engine, "RDMA_DEVICES", tmp_path / "some")
        check_protocol("rdma", None)
        check_protocol("rdma", "rxe0")
        with pytest.raises(ConfigurationError, match=r"mlx5_9.*has: rxe0") as caught:
            check_protocol("rdma", "rxe0,mlx5_9")
        assert caught.value.fields["setting"] == "device_name"

    @pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", ""])
    def test_an_address_for_others_needs_a_secret(self, host: str) -> None:
        with pytest.raises(ConfigurationError):
            MooncakeConnector.create_worker(ConnectorConfig(connector="mooncake", engine_id="P", host=host), SMALL_SPEC)


class TestMetadata:
    @pytest.mark.parametrize(
        ("blob", "why"),
        [
            (b"", "metadata"),
            (b"\xff\xff", "metadata"),
            (msgspec.msgpack.encode({"segment": "h:1"}), "metadata"),
            (msgspec.msgpack.encode({"segment": "h:1", "protocol": "tcp", "more": 1}), "metadata"),
            (msgspec.msgpack.encode({"segment": 3, "protocol": "tcp"}), "metadata"),
            (msgspec.msgpack.encode({"segment": "h", "protocol": "tcp"}), "segment"),
            (msgspec.msgpack.encode({"segment": "h/../x:1", "protocol": "tcp"}), "segment"),
            (msgspec.msgpack.encode({"segment": "h" * 9999 + ":1", "protocol": "tcp"}), "segment"),
            (msgspec.msgpack.encode({"segment": "h:1", "protocol": "rdma"}), "'rdma', we speak 'tcp'"),
        ],
    )
    def test_what_is_no_handle_is_refused(self, blob: bytes, why: str) -> None:
        with pytest.raises(HandshakeError, match=why):
            decode_handle(blob, "tcp", "P")
        assert decode_handle(msgspec.msgpack.encode(Handle(segment="h:1", protocol="tcp")), "tcp", "P").segment == "h:1"

    @pytest.mark.parametrize(
        "blob", [b"", b"\x93\x01\x02", msgspec.msgpack.encode({"segment": "127.0.0.1:1", "protocol": "tcp"})]
    )
    def test_an_owner_that_forges_it_costs_one_load(self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch, blob: bytes) -> None:
        plain = MooncakeTransport.publish
        p = pairs.engine("good", "producer")

        def forged(self: MooncakeTransport) -> Publication:
            return dataclasses.replace(plain(self), blob=blob)

        monkeypatch.setattr(MooncakeTransport, "publish", forged)
        bad = pairs.engine("bad", "producer")
        monkeypatch.setattr(MooncakeTransport, "publish", plain)
        d = pairs.engine("D", "consumer")
        assert d.load("q", B, bad.prefill("r", B, [1, 2, 3]), [4, 5, 6]) == "failed"
        assert d.load("s", A, p.prefill("t", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert d.has(A, [4, 5, 6])


class TestEngines:
    def test_none_is_destroyed_and_the_next_gets_it(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        p.sleep()
        p.wake()
        link_engines = len(mooncake_engine._idle.get(("127.0.0.1", "tcp", None), []))
        assert link_engines >= 1, "the link's engine waits for the next"
        assert d.load("s", B, p.prefill("t", B, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert d.has(B, [4, 5, 6])
        assert len(mooncake_engine._idle[("127.0.0.1", "tcp", None)]) == link_engines - 1

    def test_what_waits_has_nothing_registered(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        pairs.close()
        waiting = [engine for engines in mooncake_engine._idle.values() for engine in engines]
        assert waiting
        assert not any(engine._registered for engine in waiting)

    def test_p2_the_regions_are_registered_exactly_while_they_are_mapped(self, pairs: Pairs) -> None:
        p = pairs.engine("P", "producer")
        engine = transport_of(p)._engine
        assert engine is not None
        fence = engine._registered[0]
        for _ in range(2):
            assert engine._registered == [fence, *transport_of(p)._geometry.bases]
            p.sleep()
            assert engine._registered == [fence], "the fence never sleeps"
            p.wake()

    def test_an_unregister_that_fails_is_remembered(self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
        p = pairs.engine("P", "producer")
        transport = transport_of(p)
        engine = transport._engine
        assert engine is not None
        plain = engine.unregister

        def refuse(address: int) -> None:
            raise TransportError("told to fail", transport="mooncake")

        monkeypatch.setattr(engine, "unregister", refuse)
        with pytest.raises(TransportError):
            transport.unpublish()
        assert transport._published == list(transport._geometry.bases)
        monkeypatch.setattr(engine, "unregister", plain)
        transport.unpublish()
        assert transport._published == []
        transport.publish()

    def test_a_register_that_fails_leaves_nothing_registered(self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
        p = pairs.engine("P", "producer")
        transport = transport_of(p)
        engine = transport._engine
        assert engine is not None
        transport.unpublish()
        real = transport._geometry
        calls: list[int] = []
        plain = engine.register

        def second_fails(address: int, nbytes: int) -> None:
            calls.append(address)
            if len(calls) == 2:
                raise TransportError("told to fail", transport="mooncake")
            plain(address, nbytes)

        half = real.sizes[0] // 2
        transport._geometry = dataclasses.replace(real, bases=(real.bases[0], real.bases[0] + half), sizes=(half, half))
        monkeypatch.setattr(engine, "register", second_fails)
        with pytest.raises(TransportError):
            transport.publish()
        assert (transport._published, len(engine._registered)) == ([], 1)
        monkeypatch.setattr(engine, "register", plain)
        transport._geometry = real
        transport.publish()

    def test_p2_a_reader_s_buffer_that_cannot_be_given_up_waits_beside_one_with_a_read_in_flight(
        self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        p, d = pairs.pair()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        transport, go = transport_of(d), threading.Event()
        flying = transport._new_station()
        flying.flight = Flight(lambda: go.wait(WAIT_S) and None)
        assert not transport._dispose(flying)

        def refuse(self: Engine, address: int) -> None:
            raise TransportError("told to fail", transport="mooncake")

        with monkeypatch.context() as broken:
            broken.setattr(Engine, "unregister", refuse)
            d.sleep()
        assert transport._set_aside[0] is flying, "bytes may land there"
        assert len(transport._set_aside) == 2
        go.set()
        assert flying.flight.wait(time.monotonic() + WAIT_S)
        d.wake()
        assert d.load("s", B, p.prefill("t", B, [1, 2, 3]), [4, 5, 6]) == "recving"
        p.sleep()
        assert transport._set_aside == []

    def test_an_engine_whose_buffer_cannot_be_registered_is_handed_on(
        self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        d = pairs.engine("D", "consumer")
        where = ("127.0.0.1", "tcp", None)
        engine = mooncake_engine.borrow_engine(*where)
        plain, calls = engine.register, itertools.count(1)

        def second_fails(address: int, nbytes: int) -> None:
            if next(calls) == 2:
                raise TransportError("told to fail", transport="mooncake")
            plain(address, nbytes)

        monkeypatch.setattr(mooncake_reads, "borrow_engine", lambda *where: engine)
        monkeypatch.setattr(engine, "register", second_fails)
        with pytest.raises(TransportError, match="told"):
            transport_of(d)._new_station()
        assert engine in mooncake_engine._idle[where]
        assert not engine._registered

    def test_what_mooncake_refuses_is_an_error_with_its_code(self) -> None:
        needs("mooncake")
        engine = mooncake_engine.borrow_engine("127.0.0.1", "tcp", None)
        page = np.zeros(4096, dtype=np.uint8)
        engine.register(page.ctypes.data, 4096)
        with pytest.raises(TransportError, match="code -") as caught:
            engine.register(page.ctypes.data, 4096)
        assert caught.value.fields["transport"] == "mooncake"
        engine.unregister(page.ctypes.data)
        with pytest.raises(TransportError, match="unregister"):
            engine.unregister(page.ctypes.data)
        with pytest.raises(TransportError, match="not registered there"):
            engine.read(engine.segment, [page.ctypes.data], [page.ctypes.data], [8])
        mooncake_engine.return_engine(engine, "127.0.0.1", "tcp", None)


class TestReads:
    def test_many_slices_go_in_batches(self, monkeypatch: pytest.MonkeyPatch, pairs: Pairs) -> None:
        monkeypatch.setattr(mooncake_engine, "MAX_SLICES", 3)
        p, d = pairs.pair()
        prompt = list(range(27))
        assert d.load("q", prompt, p.prefill("r", prompt, [6, 0, 5, 1, 4, 2, 3]), [1, 2, 3, 4, 5, 6, 7]) == "recving"
        assert d.has(prompt, [1, 2, 3, 4, 5, 6, 7])

    @pytest.mark.parametrize("blocks", [[0, 1, 2], [2, 1, 0], [5, 6, 1], [7, 0, 1]])
    def test_neighbours_go_in_one_slice(self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch, blocks: list[int]) -> None:
        p, d = pairs.pair()
        sizes: list[int] = []
        plain = Engine.read

        def counted(self: Engine, peer: str, local: Any, remote: Any, lengths: Any) -> None:
            sizes.extend(lengths)
            plain(self, peer, local, remote, lengths)

        params = p.prefill("r", A, blocks)
        monkeypatch.setattr(Engine, "read", counted)
        assert d.load("q", A, params, [4, 5, 6]) == "recving"
        assert d.has(A, [4, 5, 6])
        runs = 1 + sum(b != a + 1 for a, b in itertools.pairwise(blocks))
        block = SMALL_SPEC.block_bytes
        assert len([s for s in sizes if s >= block]) == runs * 2 * SMALL_SPEC.num_layers

    def test_one_that_does_not_end_is_set_aside_and_its_bytes_go_nowhere(
        self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        p = pairs.engine("P", "producer")
        d = pairs.engine("D", "consumer", extra={"read_timeout_s": 0.2})
        assert d.load("warm", A, p.prefill("w", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        go, plain = threading.Event(), Engine.read

        def late(self: Engine, peer: str, local: Any, remote: Any, lengths: Any) -> None:
            if max(lengths) >= SMALL_SPEC.block_bytes:
                assert go.wait(WAIT_S)
            plain(self, peer, local, remote, lengths)

        monkeypatch.setattr(Engine, "read", late)
        params = p.prefill("r", B, [1, 2, 3])
        before = [d.block(b) for b in range(8)]
        assert d.load("q", B, params, [0, 1, 2]) == "failed"
        assert len(transport_of(d)._set_aside) == 1
        d.sleep()
        d.wake()
        for tensor in d.kv_caches.values():
            tensor.zero_()
        before = [d.block(b) for b in range(8)]
        go.set()
        time.sleep(0.1)
        assert [d.block(b) for b in range(8)] == before
        monkeypatch.setattr(Engine, "read", plain)
        assert d.load("s", B, p.prefill("t", B, [1, 2, 3]), [4, 5, 6]) == "recving"

    def test_a_flight_s_error_is_its_caller_s(self) -> None:
        def fail() -> None:
            raise TransportError("told to fail", transport="mooncake")

        with pytest.raises(TransportError, match="told"):
            Flight(fail).wait(time.monotonic() + WAIT_S)
        gate = threading.Event()
        flight = Flight(lambda: gate.wait(WAIT_S) and None)
        assert not flight.wait(time.monotonic())
        assert flight.in_flight
        gate.set()
        assert flight.wait(time.monotonic() + WAIT_S)
        assert not flight.in_flight
