"""What the enumerations of this folder found, each as a test of its own: a bounded run may not meet it by chance."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_engine import Engine, Peer
from fault_points import FOR_EVER, Point, armed
from test_reader_faults import linked, pair

from torpor._native import Device, Op
from torpor.engine.base import EngineState
from torpor.errors import DeviceError, HookError, TorporError, TransportError
from torpor.memory import Residency


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    peer = Peer("ipc", tmp_path)
    device = Device.open("host", faults=True)
    engine = Engine(device, peer)
    assert peer.read(engine.hand_off()) is not None
    yield engine
    engine.close()
    peer.kv.close()
    gc.collect()
    device.close()


def fail(*args: object) -> None:
    raise TransportError("told to fail", transport="test")


def test_a_sleep_that_unmapped_nothing_brings_the_connector_back(engine: Engine) -> None:
    """It left the engine awake with a connector that had let go: peers could read nothing, and a wake did nothing."""
    with armed(engine.device, Point(Op.UNMAP, 1)), pytest.raises(DeviceError):
        engine.release_kv()
    assert engine.state is EngineState.AWAKE
    engine.check_serves(None, [])


def test_a_connector_that_can_neither_let_go_nor_come_back_keeps_the_engine_asleep(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine counted as awake, and the next sleep unmapped under what the transport still held."""
    assert engine.connector is not None
    with monkeypatch.context() as broken:
        broken.setattr(engine.connector._transport, "unpublish", fail)
        broken.setattr(engine.connector._transport, "publish", fail)
        for _ in range(2):
            with pytest.raises(HookError):
                engine.sleep(level=1)
            engine.check()
            assert engine.state is EngineState.ASLEEP
            assert engine.core.stats().missing_tags == ("kv_cache",)
            assert all(t.residency is Residency.RESIDENT for t in engine.worker.memory.stats().tags)
        with pytest.raises(HookError):
            engine.wake()
    engine.wake()
    engine.check_serves(None, [])


def test_a_silent_peer_stops_every_sleep_also_where_serving_again_failed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a withdrawal that failed and a publication that failed, the next sleep went ahead under the peer's import."""
    assert engine.connector is not None
    owner = engine.connector._owner
    assert owner is not None
    with monkeypatch.context() as silent:
        silent.setattr(owner, "_see_off", lambda deadline: ["D"])
        silent.setattr(engine.connector._transport, "publish", fail)
        for _ in range(2):
            with pytest.raises(HookError, match="did not let go"):
                engine.sleep(level=1)
            assert engine.worker.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
    with monkeypatch.context() as silent:
        silent.setattr(owner, "_see_off", lambda deadline: ["D"])
        with pytest.raises(TorporError, match="did not let go"):
            engine.sleep(level=1)
    engine.wake()
    engine.check_serves(None, [])
    engine.sleep(level=1)
    engine.check()


def test_integrity_knows_memory_that_the_driver_did_not_take_back(engine: Engine) -> None:
    """A wake whose map failed and whose undo failed: asleep, with condemned memory that still lies in the range."""
    engine.sleep(level=1)
    with armed(engine.device, Point(Op.MAP, 2), Point(Op.UNMAP, 1)), pytest.raises(DeviceError):
        engine.wake()
    assert engine.device.stats().condemned_bytes > 0
    engine.check(rss=True)
    engine.wake()
    engine.check_serves(None, [])


def test_a_shutdown_that_the_driver_stopped_can_be_repeated(tmp_path: Path) -> None:
    """The second call did nothing, and the memory stayed for good."""
    device = Device.open("host", faults=True)
    engine = Engine(device, None)
    with armed(device, Point(Op.UNMAP, 1, FOR_EVER)), pytest.raises(DeviceError):
        engine.core.shutdown()
    assert engine.state is EngineState.DEAD
    engine.close()
    gc.collect()
    assert device.stats().live_regions == 0
    device.close()


@pytest.mark.parametrize("op", [Op.UNMAP, Op.RELEASE, Op.FREE_ADDRESS])
def test_a_reader_whose_driver_keeps_an_import_does_not_sleep_and_lets_go_later(tmp_path: Path, op: Op) -> None:
    """The import was forgotten: nobody could drop it any more, and the owner's memory was held for good."""
    with pair("ipc", tmp_path) as both:
        linked(both)
        with armed(both.device, Point(op, 1, FOR_EVER)), pytest.raises(HookError, match="cannot be let go of"):
            both.reader.sleep()
        assert both.reader.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
        both.reader.sleep()
        assert both.device.stats().live_imports == 0
        assert both.owner.sleep().held_bytes == 0
        both.both_serve()


def test_a_link_s_thread_survives_a_driver_that_keeps_its_import(tmp_path: Path) -> None:
    """A withdrawal met a driver's error: the thread died of it, and the import stayed."""
    with pair("ipc", tmp_path) as both:
        linked(both)
        with armed(both.device, Point(Op.UNMAP, 1, 3)):
            assert both.owner.sleep().held_bytes == 0
        assert both.device.stats().live_imports == 0
        assert not [t for t in threading.enumerate() if t.name.startswith("torpor-kv-link")]
        both.both_serve()
