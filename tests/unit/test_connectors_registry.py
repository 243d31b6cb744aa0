"""Connectors by name, the in-process one that tests use, and P4a: a release is believed when it is seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from connector_pairs import A, B, Pairs

from torpor.connectors import ConnectorConfig, KVConnector, get_connector, pins
from torpor.connectors import nixl_agent as agents
from torpor.connectors.base import KVConnectorWorker
from torpor.connectors.ipc import IpcConnector, IpcTransport
from torpor.connectors.options import Options
from torpor.connectors.pins import PinWatch
from torpor.connectors.registry import KNOWN
from torpor.connectors.transport import Publication
from torpor.connectors.worker import PullWorker
from torpor.errors import ConfigurationError, ConnectorError, HookError, TransportError
from torpor.kvcache.types import KVCacheSpec
from torpor.memory.procfs import pinned_bytes
from torpor.memory.types import Residency
from torpor.testing.connectors import MemoryConnector, MemoryConnectorWorker, UnsupportedConnector
from torpor.testing.kv_engine import KVEngine
from torpor.testing.pinned import PinnedRegistration, pinning_is_permitted


class TestNames:
    @pytest.mark.parametrize("name", ["ipc", "nixl", "mooncake"])
    def test_the_known_ones_follow_a_sleep(self, name: str) -> None:
        found = get_connector(name)
        assert issubclass(found, KVConnector)
        assert found.supports_sleep_mode
        assert found.guarded

    def test_a_class_by_its_path(self) -> None:
        assert get_connector("torpor.testing.connectors:MemoryConnector") is MemoryConnector

    @pytest.mark.parametrize(
        "name", ["", "carrier-pigeon", "no.such.module:X", "torpor.errors:TorporError", "torpor.errors:Nothing", ":X"]
    )
    def test_anything_else_is_refused_by_name(self, name: str) -> None:
        with pytest.raises(ConnectorError, match="connector") as caught:
            get_connector(name)
        assert caught.value.fields["connector"] == name

    def test_an_unknown_one_lists_the_known(self) -> None:
        with pytest.raises(ConnectorError) as caught:
            get_connector("pigeon")
        assert f"known: {', '.join(KNOWN)}, or module:Class" in str(caught.value)

    def test_without_its_package_nixl_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in agents.PACKAGES:
            monkeypatch.setitem(sys.modules, name, None)
        assert get_connector("nixl")
        with pytest.raises(ConnectorError, match=r"pip install 'torpor\[nixl\]'"):
            agents.load_package()

    def test_support_is_declared_and_not_assumed(self) -> None:
        assert not KVConnector.supports_sleep_mode
        assert not UnsupportedConnector.supports_sleep_mode


class TestMemoryConnector:
    @pytest.fixture
    def engines(self) -> Iterator[tuple[KVEngine, KVEngine]]:
        def make(name: str) -> KVEngine:
            return KVEngine(ConnectorConfig(connector="memory", engine_id=name), kind=MemoryConnector)

        with make("P") as p, make("D") as d:
            yield p, d
        assert not MemoryConnectorWorker.shelf

    def test_blocks_cross(self, engines: tuple[KVEngine, KVEngine]) -> None:
        p, d = engines
        params = p.prefill("r", A, [1, 2, 3])
        assert p.wait("r") == "sending"
        assert d.load("q", A, params, [4, 5, 6]) == "recving"
        assert d.has(A, [4, 5, 6])
        assert d.load("again", A, params, [4, 5, 6]) == "failed"
        assert d.load("other", B, params, [4, 5, 6]) == "failed"

    def test_p1_a_sleep_makes_a_new_epoch(self, engines: tuple[KVEngine, KVEngine]) -> None:
        p, d = engines
        before = p.worker.epoch()
        p.sleep()
        assert p.worker.get_handshake_metadata() is None
        p.wake()
        assert p.worker.epoch() not in (None, before)
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"

    def test_e1_its_buffer_lies_in_no_pool(self, engines: tuple[KVEngine, KVEngine]) -> None:
        p, _ = engines
        assert isinstance(p.worker, MemoryConnectorWorker)
        assert isinstance(p.worker.buffer, torch.Tensor)
        assert p.memory.tag_of(p.worker.buffer) is None
        assert p.worker.kv_caches["layers.0"] is p.kv_caches["layers.0"]

    def test_it_fails_as_often_as_it_was_told(self, engines: tuple[KVEngine, KVEngine]) -> None:
        p, _ = engines
        assert isinstance(p.worker, MemoryConnectorWorker)
        p.worker.fail_release = 1
        with pytest.raises(HookError):
            p.sleep()
        p.sleep()
        p.worker.fail_restore = 1
        with pytest.raises(HookError):
            p.wake()
        assert p.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
        p.wake()
        assert p.worker.epoch() is not None


class TestPinnedConnector:
    """What stands for RDMA in the conformance suite behaves as an RDMA registration does."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[tuple[KVEngine, KVEngine]]:
        assert pinning_is_permitted(), "io_uring is needed for this"
        pairs = Pairs("torpor.testing.connectors:PinnedConnector", tmp_path)
        extra = {"socket_dir": str(tmp_path / "kv")}
        yield pairs.pair(extra=extra)
        pairs.close()

    def test_p4a_what_is_published_is_pinned_until_it_is_released(self, pair: tuple[KVEngine, KVEngine]) -> None:
        p, _ = pair
        nbytes = p.worker.stats().registered_bytes
        before = pinned_bytes()
        assert before >= nbytes > 0
        assert p.sleep().held_bytes == 0
        assert pinned_bytes() == before - nbytes
        p.wake()
        assert pinned_bytes() == before

    def test_a_key_of_before_opens_nothing(self, pair: tuple[KVEngine, KVEngine]) -> None:
        p, d = pair
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        (region,) = p.worker._transport.regions  # type: ignore[attr-defined]
        assert len(region.read(0, 16)) == 16
        p.sleep()
        with pytest.raises(TransportError, match="registration is gone"):
            region.read(0, 16)

    def test_a_registration_that_stays_reads_the_old_pages(self, tmp_path: Path) -> None:
        pairs = Pairs("torpor.testing.connectors:UnfollowedPinned", tmp_path)
        try:
            p, d = pairs.pair(extra={"socket_dir": str(tmp_path / "kv")})
            assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            report = p.sleep()
            assert report.held_bytes == report.unmapped_bytes
            p.wake()
            assert d.load("s", B, p.prefill("s", B, [1, 2, 3]), [4, 5, 6]) == "recving"
            assert d.has(A, [4, 5, 6]), "the pages from before the sleep, with success"
        finally:
            pairs.close()


class StickyTransport(IpcTransport):
    """Pins what it publishes, as an RDMA registration does, and forgets to let go as often as it is told."""

    forget = 0
    _pin: PinnedRegistration | None = None

    def publish(self) -> Publication:
        publication = super().publish()
        if self._pin is None:
            self._pin = PinnedRegistration(self._geometry.bases[0], self._geometry.sizes[0])
        return publication

    def unpublish(self) -> None:
        super().unpublish()
        if self.forget > 0:
            self.forget -= 1
        elif self._pin is not None:
            self._pin.close()
            self._pin = None


class StickyConnector(IpcConnector):
    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"socket_dir"})
        return PullWorker(config, spec, StickyTransport(config, options), options)


class Pinned:
    """VmPin as it is told, reading by reading; the last one stays."""

    def __init__(self, *told: int) -> None:
        self._told = list(told)

    def __call__(self) -> int:
        return self._told.pop(0) if len(self._told) > 1 else self._told[0]


class TestPins:
    def test_p4a_what_goes_a_moment_later_is_waited_for(self) -> None:
        pinned = Pinned(0, 50, 50, 50, 50, 0)
        watch = PinWatch(pinned)
        with watch.registering(50):
            pass
        with watch.deregistering():
            pass
        assert watch.held_bytes == 0

    def test_p4a_what_stays_is_an_error_with_its_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pins, "SETTLE_S", 0.0)
        watch = PinWatch(Pinned(0, 4096, 4096))
        with watch.registering(4096):
            pass
        with pytest.raises(TransportError, match="4096 bytes are still pinned") as caught, watch.deregistering():
            pass
        assert caught.value.fields["bytes"] == 4096

    def test_p4a_what_the_transport_pins_for_itself_is_not_asked_back(self) -> None:
        """UCX over RDMA verbs: more with the registration, and more with the first read. A sleep would be refused for ever."""
        watch = PinWatch(Pinned(100, 100 + 64 + 20, 100 + 64 + 20 + 10, 100 + 20 + 10))
        with watch.registering(64):
            pass
        with watch.deregistering():
            pass
        assert watch.held_bytes == 0

    def test_p4a_a_transport_that_pins_nothing_owes_nothing(self) -> None:
        watch = PinWatch(Pinned(100, 110, 110))
        with watch.registering(64):
            pass
        with watch.deregistering():
            pass

    def test_p4a_what_a_failed_release_left_is_asked_back_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A registration cache hands the old registration out again: nothing more is pinned, and all of it is still ours."""
        monkeypatch.setattr(pins, "SETTLE_S", 0.0)
        watch = PinWatch(Pinned(0, 64, 64, 64, 64, 64))
        with watch.registering(64):
            pass
        with pytest.raises(TransportError), watch.deregistering():
            pass
        with watch.registering(64):
            pass
        assert watch.held_bytes == 64
        with pytest.raises(TransportError), watch.deregistering():
            pass

    def test_p4a_what_a_cache_dropped_meanwhile_is_not_asked_back_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pins, "SETTLE_S", 0.0)
        watch = PinWatch(Pinned(0, 64, 64, 0, 64, 64, 0))
        with watch.registering(64):
            pass
        with pytest.raises(TransportError), watch.deregistering():
            pass
        with watch.registering(64):  # it went in between, unseen
            pass
        with watch.deregistering():
            pass
        assert watch.held_bytes == 0

    def test_p4a_a_registration_that_stays_stops_the_sleep(self, tmp_path: Path) -> None:
        """With the kernel's own pins: nothing is unmapped, peers are served again, and the next sleep is a true one."""
        assert pinning_is_permitted(), "io_uring is needed for this"
        pairs = Pairs("ipc", tmp_path)
        p, d = pairs.engine("P", "producer", kind=StickyConnector), pairs.engine("D", "consumer")
        try:
            assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            p.worker._transport.forget = 2  # type: ignore[attr-defined]
            with pytest.raises(HookError) as caught:
                p.sleep()
            assert isinstance(caught.value.__cause__, TransportError)
            assert "pinned" in str(caught.value.__cause__)
            assert p.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
            assert d.load("q2", B, p.prefill("s", B, [1, 2, 3]), [4, 5, 6]) == "recving"
            assert d.has(B, [4, 5, 6])
            assert p.sleep().held_bytes == 0
        finally:
            pairs.close()


@pytest.mark.parametrize("port", [-1, 65536, 99999, True])
def test_a_port_that_is_none_is_refused_before_anything_starts(port: int) -> None:
    with pytest.raises(ConfigurationError, match="kv_port") as caught:
        ConnectorConfig(connector="nixl", port=port)
    assert caught.value.setting == "kv_port"
