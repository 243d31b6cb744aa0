"""``nixl`` from inside: what it remembers when NIXL refuses something half way, and what it tells (P2, P4a, P5, E4)."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from connector_pairs import A, B, Pairs

from torpor.connectors import ConnectorConfig, nixl_agent, nixl_settings, wire
from torpor.connectors.base import HandOff
from torpor.connectors.fence import FencePage
from torpor.connectors.leases import CONFIRM_S, LeaseTable
from torpor.connectors.nixl import NixlConnector
from torpor.connectors.nixl_registrations import Registrations
from torpor.engine.config import SleepConfig
from torpor.engine.kv_connector import choose_connector
from torpor.errors import ConfigurationError, ConnectorError, TransportError
from torpor.kvcache.types import BlockId, Epoch, KVCacheSpec
from torpor.testing.clock import FakeClock
from torpor.testing.kv_engine import KVEngine
from torpor.testing.pinned import PinnedRegistration, pinning_is_permitted

RANGES = [(0x1000, 10), (0x2000, 20), (0x3000, 30)]
FOR_EVER = 1000


class FakeAgent:
    """Registers in a list. ``refusing``: how often a call for that address fails from now on."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.calls: list[str] = []
        self.refusing: dict[tuple[str, int], int] = {}

    def register(self, ranges: list[tuple[int, int]], kind: str, device: int) -> int:
        ((address, _),) = ranges
        self._ask("register", address)
        self.registered.append(address)
        return address

    def deregister(self, handle: int) -> None:
        self._ask("deregister", handle)
        self.registered.remove(handle)

    def _ask(self, call: str, address: int) -> None:
        self.calls.append(f"{call} {address:#x}")
        if self.refusing.get((call, address), 0) > 0:
            self.refusing[call, address] -= 1
            raise TransportError(f"{call} {address:#x} was told to fail", transport="test")


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def registrations(agent: FakeAgent) -> Registrations:
    return Registrations(agent, "DRAM", 0)  # type: ignore[arg-type]


class TestRegistrations:
    @pytest.mark.parametrize("which", range(3))
    def test_p4a_a_range_that_fails_takes_those_before_it_back(
        self, agent: FakeAgent, registrations: Registrations, which: int
    ) -> None:
        agent.refusing["register", RANGES[which][0]] = 1
        with pytest.raises(TransportError, match="register"):
            registrations.add(RANGES)
        assert (agent.registered, registrations.nbytes) == ([], 0)
        registrations.add(RANGES)
        assert agent.registered == [address for address, _ in RANGES]

    def test_p4a_what_cannot_be_taken_back_is_remembered_and_tried_again(
        self, agent: FakeAgent, registrations: Registrations
    ) -> None:
        agent.refusing = {("register", 0x3000): 1, ("deregister", 0x1000): 2}
        with pytest.raises(TransportError, match="register 0x3000"):
            registrations.add(RANGES)
        assert (agent.registered, registrations.nbytes) == ([0x1000], 10)
        with pytest.raises(TransportError, match=r"1 of the KV cache's ranges \(10 bytes\)"):
            registrations.drop()
        registrations.drop()
        assert (agent.registered, registrations.nbytes) == ([], 0)

    def test_p4a_one_that_is_refused_keeps_no_other(self, agent: FakeAgent, registrations: Registrations) -> None:
        registrations.add(RANGES)
        agent.refusing["deregister", 0x2000] = 1
        with pytest.raises(TransportError) as caught:
            registrations.drop()
        assert caught.value.fields["bytes"] == registrations.nbytes == 20
        assert agent.registered == [0x2000]
        agent.calls.clear()
        registrations.drop()
        registrations.drop()
        assert agent.calls == ["deregister 0x2000"], "the others are not tried a second time"


# ---- with NIXL itself ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Pairs]:
    pytest.importorskip("nixl_cu13")
    with contextlib.closing(Pairs("nixl", tmp_path)) as pairs:
        yield pairs


def transport_of(engine: KVEngine) -> Any:
    return engine.worker._transport  # type: ignore[attr-defined]


def link_of(engine: KVEngine) -> Any:
    (puller,) = engine.worker._reader._pullers.values()  # type: ignore[attr-defined]
    return puller.link


def counted(target: Any, *names: str) -> dict[str, list[Any]]:
    """The first argument of every call of these methods, from now on."""
    calls: dict[str, list[Any]] = {name: [] for name in names}

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            calls[name].append(args[0] if args else None)
            return real(*args)

        return wrapper

    for name in names:
        setattr(target, name, wrap(name, getattr(target, name)))
    return calls


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.002)


def test_one_registration_per_region_not_per_tensor(pairs: Pairs) -> None:
    p = pairs.engine("P", "producer")
    calls = counted(transport_of(p)._agent, "register", "deregister")
    p.sleep()
    p.wake()
    geometry = transport_of(p)._geometry
    assert calls["register"] == [[(base, size)] for base, size in zip(geometry.bases, geometry.sizes, strict=True)]
    assert len(calls["deregister"]) == len(geometry.bases) < len(p.kv_caches)


def test_p2_a_withdrawal_forgets_the_owner_s_agent_and_a_wake_makes_new_lists(pairs: Pairs) -> None:
    p, d = pairs.pair()
    assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    remote = link_of(d)._remote
    station, lists = remote._station, (remote._blocks, remote._fence)
    forgotten = counted(station.agent, "remove_remote", "deregister")
    p.sleep()
    assert len(forgotten["remove_remote"]) == 1, "by name, and not by the end of our own agent alone"
    assert len(forgotten["deregister"]) == 2, "the staging buffer and the page of the fence's words"
    assert all(prepared._released for prepared in (*lists, station.blocks, station.look))
    p.wake()
    assert d.load("s", B, p.prefill("t", B, [1, 2, 3]), [4, 5, 6]) == "recving"
    assert d.has(B, [4, 5, 6])
    again = link_of(d)._remote
    assert again._station is not station
    assert again._blocks is not lists[0]


def test_p2_a_buffer_that_nixl_does_not_let_go_keeps_no_owner_waiting(pairs: Pairs) -> None:
    """The owner is out of its reach once its agent is forgotten. The buffer is tried again with the next one."""
    p, d = pairs.pair()
    assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    station = link_of(d)._remote._station
    real, refusals = station.agent.deregister, [1]

    def refuse(registration: Any) -> None:
        if refusals:
            refusals.pop()
            raise TransportError("told to fail", transport="test")
        real(registration)

    station.agent.deregister = refuse
    assert p.sleep().held_bytes == 0
    assert transport_of(d)._set_aside == [station]
    assert station.detached
    p.wake()
    assert d.load("s", B, p.prefill("t", B, [1, 2, 3]), [4, 5, 6]) == "recving"
    p.sleep()
    wait_until(lambda: transport_of(d)._set_aside == [])
    assert not station._undo


@pytest.mark.skipif(not pinning_is_permitted(), reason="io_uring is forbidden here")
@pytest.mark.parametrize("stages", [True, False])
def test_m11_what_a_reader_pins_beside_its_cache_is_held_of_nobody(pairs: Pairs, stages: bool) -> None:
    """A buffer that is set aside with a read in flight stays pinned. Of a transport that reads into the KV cache nobody could say
    whether it is that."""
    d = pairs.engine("D", "consumer")
    transport_of(d).stages = stages
    beside = mmap.mmap(-1, 1 << 20)
    address = np.frombuffer(beside, dtype=np.uint8).ctypes.data
    with PinnedRegistration(address, 1 << 20):
        assert (d.sleep().held_bytes == 0) == stages
    d.wake()


def test_p2_an_end_gives_up_the_spare_buffer_too(pairs: Pairs) -> None:
    d = pairs.engine("D", "consumer")
    spare = transport_of(d)._spare
    d.close()
    assert not spare._undo


def test_p2_an_offer_that_is_none_costs_no_buffer(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = pairs.pair()
    spare = transport_of(d)._spare
    transport = transport_of(p)
    plain = transport.publish
    monkeypatch.setattr(transport, "publish", lambda: dataclasses.replace(plain(), blob=b"nonsense"))
    p.sleep()
    p.wake()
    assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "failed"
    assert not spare._undo
    monkeypatch.undo()
    p.sleep()
    p.wake()
    assert d.load("s", B, p.prefill("t", B, [1, 2, 3]), [4, 5, 6]) == "recving"


def test_p2_a_peer_that_cannot_be_forgotten_is_not_acknowledged(pairs: Pairs) -> None:
    p, d = pairs.pair(withdraw_timeout_s=0.5)
    assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    station = link_of(d)._remote._station
    refusals = [FOR_EVER]

    def refuse(peer: str) -> None:
        if refusals[0]:
            refusals[0] -= 1
            raise TransportError("told to fail", transport="test")
        station.agent.__class__.remove_remote(station.agent, peer)

    station.agent.remove_remote = refuse
    assert not link_of(d)._remote.close()
    assert not station.detached
    refusals[0] = 0
    assert transport_of(d)._dispose(station)


def test_a_read_takes_word_of_itself_to_the_owner_and_nixl_tells_of_it(pairs: Pairs) -> None:
    p, d = pairs.pair()
    before = d.worker.stats().transfers
    assert before is not None
    assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    told = d.worker.stats().transfers
    assert told is not None
    moved = d.worker.stats().bytes_received
    assert told.bytes - before.bytes > moved > 0, "the blocks, and the looks at the fence"
    assert told.reads - before.reads >= 3
    assert told.descriptors > 0
    assert told.transfer_s > 0
    wait_until(lambda: (p.step(), p.worker.stats().transfers.notices)[1] == 1)  # type: ignore[union-attr]


def test_notices_of_no_meaning_are_thrown_away(pairs: Pairs) -> None:
    """A peer may send what it likes, as much as it likes: nothing of it stays, and no lease ends by it."""
    p, d = pairs.pair()
    params = p.prefill("r", A, [1, 2, 3])
    assert d.load("q", A, params, [4, 5, 6]) == "recving"
    late = p.prefill("s", B, [1, 2, 3])
    station = link_of(d)._remote._station
    for notice in (b"", b"x" * 5000, wire.read_notice(late["torpor"]["lease"], 12345), b"\0" * 20):
        station.agent._agent.send_notif(station._peer, notice)
    wait_until(lambda: (p.step(), p.worker.stats().transfers.notices)[1] == 5)  # type: ignore[union-attr]
    wait_until(lambda: (p.step(), p.worker.stats().pending_hand_offs)[1] == 1)  # that the first was read comes another way
    assert d.load("t", B, late, [4, 5, 6]) == "recving"


def test_release_and_restore_are_timed(pairs: Pairs) -> None:
    p = pairs.engine("P", "producer")
    slept = p.sleep()
    woken = p.wake()
    stats = p.worker.stats()
    assert 0 < stats.release_s <= slept.hooks_s["connector"] <= slept.phases_s["hooks"]
    assert 0 < stats.restore_s <= woken.hooks_s["connector"] <= woken.phases_s["hooks"]


# ---- leases that were read -------------------------------------------------------------------------------------------------


def test_p5_blocks_of_a_reader_that_died_after_its_read_are_free_before_the_lease_ends() -> None:
    clock, fence = FakeClock(), FencePage(16)
    leases = LeaseTable(fence, b"k" * 32, clock)
    epoch = Epoch.first()
    leases.open(epoch)
    for number, request in ((1, "read"), (2, "waits")):
        leases.grant(
            HandOff(request_id=request, block_ids=[BlockId(1)], num_tokens=4, lease_s=30, epoch=str(epoch), lease=number)
        )
    words = {number: lease.word for number, lease in leases._leases.items()}
    leases.note_arrived(1, words[2])
    leases.note_arrived(7, 7)
    clock.advance(CONFIRM_S)
    assert leases.take_ended() == frozenset(), "a notice that does not know the word ends nothing"
    leases.note_arrived(1, words[1])
    assert leases.take_ended() == frozenset(), "its reader still looks at the fence"
    clock.advance(CONFIRM_S / 2)
    leases.note_arrived(1, words[1])  # repeating it gains no time
    clock.advance(CONFIRM_S / 2)
    assert leases.take_ended() == frozenset({"read"})
    assert len(leases) == 1
    fence.close()


@pytest.mark.parametrize("notice", [b"", b"tpr1", b"tpr0" + bytes(16), wire.read_notice(1, 2) + b"\0"])
def test_other_notices_are_none_of_ours(notice: bytes) -> None:
    assert wire.parse_read_notice(notice) is None


def test_a_notice_says_lease_and_word() -> None:
    assert wire.parse_read_notice(wire.read_notice(7, 1 << 63)) == (7, 1 << 63)


# ---- other backends --------------------------------------------------------------------------------------------------------


def config_of(**extra: Any) -> ConnectorConfig:
    return ConnectorConfig(connector="nixl", engine_id="P", extra=extra)


def test_e4_other_backends_than_ucx_do_not_sleep() -> None:
    asleep, awake = SleepConfig(enable_sleep_mode=True), SleepConfig()
    assert choose_connector(config_of(), asleep)[0] is NixlConnector
    assert choose_connector(config_of(backend="UCX"), asleep)[0] is NixlConnector
    with pytest.raises(ConnectorError, match="does not support sleep mode"):
        choose_connector(config_of(backend="LIBFABRIC"), asleep)
    kind, _ = choose_connector(config_of(backend="LIBFABRIC"), awake)
    assert issubclass(kind, NixlConnector)
    assert not kind.supports_sleep_mode


@pytest.mark.parametrize("value", ["", None, 7])
def test_a_backend_is_a_name(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="backend"):
        NixlConnector.configured(config_of(backend=value))


def test_a_backend_that_this_machine_cannot_load_is_named(pairs: Pairs, small_spec: KVCacheSpec) -> None:
    with pytest.raises(TransportError, match="backend GDS_MT"):
        pairs.engine("P", "producer", spec=small_spec, extra={"backend": "GDS_MT"})


@pytest.fixture
def small_spec() -> KVCacheSpec:
    from torpor.testing.kv_engine import SMALL_SPEC

    return SMALL_SPEC


class TestSettings:
    """What UCX does not take is a matter of configuration: the setting is named, and what there is instead."""

    @pytest.fixture(autouse=True)
    def _first_of_its_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("nixl_cu13")
        monkeypatch.setattr(nixl_agent, "_taken", set())

    def start(self, tls: str | None = None) -> nixl_agent.Agent:
        return nixl_agent.Agent("of-a-test", serves=True, tls=tls)

    def test_a_transport_that_is_not_there_lists_those_that_are(self) -> None:
        with pytest.raises(ConfigurationError, match=r"ucx_tls 'pigeon'.*one or more of: .*\btcp\b") as caught:
            self.start("pigeon")
        assert (caught.value.fields["setting"], caught.value.fields["value"]) == ("ucx_tls", "pigeon")

    def test_several_transports_are_refused(self) -> None:
        """NIXL would pass on the first, and drop the rest in silence."""
        config = ConnectorConfig(connector="nixl", engine_id="E", extra={"ucx_tls": "rc,tcp"})
        with pytest.raises(ConfigurationError, match=r"one transport, not 'rc,tcp'.*UCX_TLS"):
            NixlConnector.configured(config)

    def test_a_transport_that_cannot_do_all_that_is_needed_is_named(self) -> None:
        with pytest.raises(ConfigurationError, match=r"ucx_tls 'posix'.*no active messages transport"):
            self.start("posix")

    @pytest.mark.parametrize(
        ("variable", "value", "says"),
        [
            ("UCX_TLS", "pigeon", r"one or more of: .*\btcp\b"),
            ("UCX_NET_DEVICES", "pigeon0", r"one or more of: .*lo"),
            ("UCX_RCACHE_MAX_SIZE", "many", "memory units"),
        ],
    )
    def test_a_variable_of_the_environment_is_named(
        self, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
    ) -> None:
        monkeypatch.setenv(variable, value)
        with pytest.raises(ConfigurationError, match=f"{variable} '{value}'.*{says}") as caught:
            self.start()
        assert caught.value.fields["setting"] == variable

    def test_what_once_started_is_not_what_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start("tcp").close()
        monkeypatch.setenv("UCX_RCACHE_MAX_SIZE", "many")
        with pytest.raises(TransportError, match="cannot start an agent"):
            self.start("tcp")

    def test_other_failures_are_the_transports(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nixl_settings, "_ask", lambda tls: "[1.2] [vm:1 :0]  ib_mlx5.c:1  UCX  ERROR  out of memory\n")
        with pytest.raises(TransportError, match="cannot start an agent"):
            self.start("pigeon")
