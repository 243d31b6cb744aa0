"""E6, E7, E9 (one rank), M5, M12: what dies with the memory, partial wakes, and failures at every step of a sleep and a wake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_driver import Driver, reference

from torpor._native import Device, Op
from torpor.engine.base import EngineState
from torpor.errors import (
    AsleepError,
    DeviceError,
    DeviceMemoryError,
    HookError,
    HostMemoryError,
    ModelError,
    PeerError,
    SleepAborted,
    StateError,
)
from torpor.memory import Memory, MemoryConfig
from torpor.testing.engine import FakeConnector, FakeWorker

POOLS = {"weights", "kv_cache", "runtime"}


@pytest.fixture
def engine() -> Iterator[Driver]:
    driver = Driver(connector=FakeConnector)
    yield driver
    driver.close()


@pytest.fixture
def faulty() -> Iterator[tuple[Driver, Device]]:
    """An engine whose driver calls can be made to fail."""
    device = Device.open("host", faults=True)
    worker = FakeWorker(Memory(MemoryConfig(driver="host", extent_bytes=1 << 20), device=device))
    driver = Driver(connector=FakeConnector, worker=worker)
    yield driver, device
    device.clear_faults()
    driver.close()
    worker.drop()
    device.close()


# ---- what dies with the memory (E6) -------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"level": 1}, {"level": 2}, {"policies": {"kv_cache": "discard"}}])
def test_e6_the_prefix_cache_dies_with_the_content(engine: Driver, fields: dict) -> None:
    before = engine.answer("a")
    assert engine.core.stats().cache.cached_blocks > 0
    ticket = engine.sleep(**fields)
    engine.step()
    engine.background.run()
    engine.step()  # the step that learns of the unmap
    assert ticket.result(0)["state"] == "asleep"
    assert engine.core.stats().cache.cached_blocks == 0
    engine.woken()
    assert engine.answer("b") == before
    assert engine.ends["b"].num_cached_tokens == 0


def test_e6_a_later_discard_of_kept_content_takes_the_index_with_it(engine: Driver) -> None:
    before = engine.answer("a")
    engine.slept(policies={"kv_cache": "host"})
    assert engine.core.stats().cache.cached_blocks > 0
    engine.slept(policies={"kv_cache": "discard"})
    assert engine.core.stats().cache.cached_blocks == 0
    engine.woken()
    assert engine.answer("b") == before


def test_e6_hand_offs_end_with_the_mapping(engine: Driver) -> None:
    engine.add("a", 1, hand_off=True)
    engine.settle_hand_off()
    assert engine.core.stats().scheduler.handed_off == 1
    engine.slept(level=1)
    assert engine.core.stats().scheduler.handed_off == 0
    assert engine.core.stats().cache.allocated_blocks == 0


def test_hand_offs_outlive_a_sleep_that_keeps_the_kv_cache(engine: Driver) -> None:
    engine.add("a", 1, hand_off=True)
    engine.settle_hand_off()
    ticket = engine.sleep(policies={"weights": "host"})
    engine.step()
    engine.background.run()
    engine.step(3)
    assert ticket.result(0)["state"] == "asleep"
    assert engine.core.stats().scheduler.handed_off == 1
    assert "release" not in engine.connector.calls
    engine.connector.next_finished = type(engine.connector.next_finished)(sending=frozenset({"a"}))
    engine.step()
    assert engine.core.stats().scheduler.handed_off == 0


# ---- partial wakes (E7) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", sorted(POOLS))
def test_e7_a_partial_wake_never_serves(engine: Driver, first: str) -> None:
    engine.add("frozen", 20)
    engine.step(4)
    engine.slept(level=1, mode="keep")
    known = len(engine.tokens["frozen"])
    report = engine.woken([first])
    rest = sorted(POOLS - {first})
    assert (report["state"], report["missing_tags"]) == ("asleep", rest)
    assert engine.core.stats().missing_tags == tuple(rest)
    engine.step(5)
    assert len(engine.tokens["frozen"]) == known
    with pytest.raises(AsleepError):
        engine.add("new")
    assert engine.woken(rest)["state"] == "awake"
    engine.settle()
    assert engine.tokens["frozen"] == reference(20)


def test_e7_one_pool_after_another(engine: Driver) -> None:
    engine.slept(level=2)
    assert [engine.woken([tag])["state"] for tag in ("runtime", "kv_cache", "weights")] == ["asleep", "asleep", "awake"]
    assert engine.answer("a") == reference(8)


def test_a_sleep_from_a_partial_wake_unmaps_the_rest(engine: Driver) -> None:
    engine.slept(level=1)
    engine.woken(["weights"])
    engine.slept(level=1)
    assert engine.mapped() == set()
    engine.woken()
    assert engine.answer("a") == reference(8)


# ---- a sleep that fails -------------------------------------------------------------------------------------


def test_a_silent_peer_stops_the_sleep_by_name_with_nothing_unmapped(engine: Driver) -> None:
    engine.answer("a")
    engine.connector.fail_release = PeerError("peer d1 did not let go within 5 s", peer="d1")
    with pytest.raises(SleepAborted, match=r"nothing was unmapped.*FakeConnector.*d1") as caught:
        engine.slept(level=1)
    assert (caught.value.fields["reason"], caught.value.fields["waiting_for"]) == ("hook", "d1")
    assert isinstance(caught.value.__cause__, HookError)
    assert (engine.state, engine.mapped()) == (EngineState.AWAKE, POOLS)
    assert engine.answer("b") == reference(8)
    assert engine.ends["b"].num_cached_tokens > 0, "the content is as it was, and so is its index"
    engine.connector.fail_release = None
    assert engine.slept(level=1)["state"] == "asleep"


def test_kept_requests_go_on_after_a_sleep_that_failed(engine: Driver) -> None:
    engine.add("a", 20)
    engine.step(4)
    engine.connector.fail_release = PeerError("silent", peer="d1")
    with pytest.raises(SleepAborted):
        engine.slept(level=1, mode="keep")
    engine.settle()
    assert engine.tokens["a"] == reference(20)


def test_an_undone_release_publishes_its_new_registration(engine: Driver) -> None:
    """The newest hook failed, the connector's was undone under a new epoch: hand-offs must name that one."""
    first = engine.connector_scheduler.metadata[-1]
    memory = engine.worker.memory
    unregister = memory.register_tag_hooks("kv_cache", before_unmap=lambda: None, name="newest")
    memory.register_tag_hooks("weights", before_unmap=lambda: None, name="newer")
    unregister()
    broken = FakeConnector.workers[-1]

    def fail() -> None:
        broken.release_kv_caches()
        broken.restore_kv_caches()
        raise PeerError("silent", peer="d1")

    memory.register_tag_hooks("kv_cache", before_unmap=fail, name="stubborn")
    with pytest.raises(SleepAborted):
        engine.slept(level=1)
    assert engine.connector_scheduler.metadata[-1] != first
    assert engine.connector_scheduler.metadata[-1] == engine.connector.get_handshake_metadata()


def test_an_undo_that_fails_leaves_the_engine_asleep_until_a_wake_repairs_it(engine: Driver) -> None:
    memory, broken = engine.worker.memory, [True]

    def come_back() -> None:
        if broken[0]:
            raise PeerError("no way back yet", peer="d1")

    unregister = memory.register_tag_hooks("runtime", before_unmap=lambda: 1 / 0, name="oldest refuses")
    memory.register_tag_hooks("kv_cache", before_unmap=lambda: None, after_map=come_back, name="newest")
    with pytest.raises(HookError):
        engine.slept(level=1)
    assert (engine.state, engine.mapped()) == (EngineState.ASLEEP, POOLS)
    with pytest.raises(HookError):
        engine.woken()
    assert engine.woken(["weights"])["state"] == "asleep", "the hook's tag was not part of this wake"
    broken[0] = False
    assert engine.woken()["state"] == "awake"
    unregister()
    assert engine.answer("a") == reference(8)


def test_no_host_memory_for_an_image_leaves_the_engine_serving(faulty: tuple[Driver, Device]) -> None:
    engine, device = faulty
    engine.answer("a")
    device.arm_fault(Op.COMMIT, 1)
    with pytest.raises(HostMemoryError) as caught:
        engine.slept(level=1)
    assert caught.value.fields["state"] == "awake"
    assert (engine.state, engine.mapped()) == (EngineState.AWAKE, POOLS)
    assert engine.answer("b") == reference(8)
    assert engine.slept(level=1)["state"] == "asleep"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_m12_an_unmap_that_fails_half_way_counts_as_asleep(faulty: tuple[Driver, Device], nth: int) -> None:
    engine, device = faulty
    engine.answer("a")
    device.arm_fault(Op.UNMAP, nth)
    with pytest.raises(DeviceError):
        engine.slept(level=1)
    gone = POOLS - engine.mapped()
    assert engine.state is (EngineState.ASLEEP if gone else EngineState.AWAKE)
    if nth % 2:
        assert engine.slept(level=1)["state"] == "asleep"
    engine.woken()
    assert engine.answer("b") == reference(8)


# ---- a wake that fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("nth", [1, 3])
def test_m5_no_device_memory_leaves_the_engine_asleep_and_a_retry_works(
    faulty: tuple[Driver, Device], level: int, nth: int
) -> None:
    engine, device = faulty
    engine.slept(level=level)
    device.arm_fault(Op.CREATE, nth)
    with pytest.raises(DeviceMemoryError) as caught:
        engine.woken()
    assert caught.value.fields["state"] == "asleep"
    assert (engine.state, engine.mapped()) == (EngineState.ASLEEP, set())
    assert engine.woken()["state"] == "awake"
    assert engine.answer("a") == reference(8)


def test_a_source_that_cannot_be_read_leaves_the_engine_asleep_and_a_retry_works(engine: Driver) -> None:
    engine.slept(level=2)
    engine.worker.fail_reload = ModelError("the file is gone", path="/model")
    with pytest.raises(ModelError):
        engine.woken()
    assert engine.state is EngineState.ASLEEP
    assert engine.core.stats().missing_tags == ("weights",)
    engine.worker.fail_reload = None
    report = engine.woken()
    assert (report["state"], report["refilled_tags"]) == ("awake", ["weights"])
    assert engine.answer("a") == reference(8)


def test_m3_a_connector_that_cannot_come_back_keeps_the_engine_asleep_until_a_wake_retries_it(engine: Driver) -> None:
    engine.slept(level=1)
    engine.connector.fail_restore = PeerError("no", peer="d1")
    with pytest.raises(HookError):
        engine.woken()
    assert (engine.state, engine.mapped()) == (EngineState.ASLEEP, POOLS)
    assert engine.core.stats().missing_tags == ("kv_cache",)
    assert engine.woken(["weights"])["missing_tags"] == ["kv_cache"]
    engine.connector.fail_restore = None
    assert engine.woken()["state"] == "awake"
    assert engine.connector_scheduler.metadata[-1] is not None
    assert engine.answer("a") == reference(8)


def test_an_unknown_failure_is_told_and_survived(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.worker.memory, "sleep", lambda policies: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        engine.slept(level=1)
    monkeypatch.undo()
    assert engine.answer("a") == reference(8)


def test_lost_content_cannot_go_to_the_host_and_the_engine_stays_asleep(engine: Driver) -> None:
    engine.slept(level=2)
    with pytest.raises(StateError):
        engine.slept(level=1)
    assert engine.state is EngineState.ASLEEP
    engine.woken()
    assert engine.answer("a") == reference(8)
