"""E1, E4, E5 and the republishing half of E3: where a connector stands in the engine's life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_driver import Driver

from torpor.engine.base import EngineState
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.engine.kv_connector import subscribe
from torpor.errors import ConnectorError
from torpor.models.config import ModelConfig
from torpor.testing.engine import FakeConnector, FakeConnectorWorker, FakeWorker, FixedConnector, fake_core

POOLS_ONLY = SleepConfig(enable_pools=True)


@pytest.fixture
def engine() -> Iterator[Driver]:
    driver = Driver(connector=FakeConnector)
    yield driver
    driver.close()


def test_e1_what_a_connector_allocates_belongs_to_no_tag(engine: Driver) -> None:
    memory, worker = engine.worker.memory, engine.worker
    assert engine.connector.buffer is not None
    assert memory.tag_of(engine.connector.buffer) is None
    assert memory.tag_of(worker.block_tables) == "runtime"
    assert memory.tag_of(worker.kv_caches["layers.0"]) == "kv_cache"
    assert engine.connector.kv_caches["layers.0"] is worker.kv_caches["layers.0"]


def test_e1_the_connector_s_buffer_survives_a_sleep(engine: Driver) -> None:
    buffer = engine.connector.buffer
    assert buffer is not None
    buffer.fill_(7.0)
    engine.slept(level=1)
    assert buffer.min() == buffer.max() == 7.0


def test_a_load_that_has_ended_wakes_the_engine_s_loop() -> None:
    """Without it every load would take as long as the loop naps between two looks at the connector."""
    worker, woken = FakeWorker(), []
    config = EngineConfig(model=ModelConfig(source="fake"), sleep=SleepConfig(enable_sleep_mode=True))
    core = fake_core(config, worker, connector=FakeConnector, on_ready=lambda: woken.append(True))
    assert isinstance(worker.connector, FakeConnectorWorker)
    worker.connector.tell()
    assert woken == [True]
    core.shutdown()


def test_e4_a_connector_that_cannot_follow_is_refused_at_start_up() -> None:
    with pytest.raises(ConnectorError, match=r"FixedConnector.*enable_sleep_mode") as caught:
        Driver(connector=FixedConnector)
    assert (caught.value.fields["connector"], caught.value.fields["setting"]) == ("FixedConnector", "enable_sleep_mode")


@pytest.mark.parametrize(
    "fields", [{"level": 1}, {"level": 2}, {"policies": {"kv_cache": "discard"}}, {"policies": {"kv_cache": "host"}}]
)
def test_e4_with_pools_only_the_sleep_is_refused_before_anything_is_unmapped(fields: dict) -> None:
    engine = Driver(sleep=POOLS_ONLY, connector=FixedConnector)
    engine.add("a", 50)
    engine.step(2)
    with pytest.raises(ConnectorError, match="FixedConnector"):
        engine.sleep(**fields).result(0)
    assert (engine.state, engine.mapped()) == (EngineState.AWAKE, {"weights", "kv_cache", "runtime"})
    assert engine.background.pending == 0
    engine.close()


def test_e4_with_pools_only_the_kv_release_is_refused() -> None:
    engine = Driver(sleep=POOLS_ONLY, connector=FixedConnector)
    with pytest.raises(ConnectorError, match="FixedConnector"):
        engine.core.release_kv_cache_memory().result(0)
    assert engine.mapped() == {"weights", "kv_cache", "runtime"}
    engine.close()


def test_e4_a_pause_is_never_refused() -> None:
    engine = Driver(sleep=POOLS_ONLY, connector=FixedConnector)
    assert engine.slept(level=0)["state"] == "paused"
    engine.woken()
    ticket = engine.core.pause()
    engine.settle()
    assert ticket.result(0)["state"] == "paused"
    engine.core.resume().result(0)
    assert engine.slept(policies={"weights": "host"})["state"] == "asleep", "the KV cache stays mapped"
    engine.close()


def test_e4_with_pools_only_a_connector_that_follows_may_sleep() -> None:
    engine = Driver(sleep=POOLS_ONLY, connector=FakeConnector)
    assert engine.slept(level=1)["state"] == "asleep"
    engine.close()


def test_e5_a_connector_that_follows_is_called_around_the_mapping(engine: Driver) -> None:
    engine.slept(level=1)
    assert engine.connector.calls == ["register", "release"]
    engine.woken(["weights"])
    assert engine.connector.calls == ["register", "release"]
    engine.woken()
    assert engine.connector.calls == ["register", "release", "restore"]


def test_e5_a_connector_that_does_not_is_never_called() -> None:
    engine = Driver(sleep=POOLS_ONLY, connector=FixedConnector)
    connector = engine.connector
    engine.worker.memory.sleep({"kv_cache": "discard"})
    engine.worker.memory.wake()
    assert connector.calls == ["register"]
    engine.close()


def test_e5_a_connector_is_unsubscribed_at_shutdown() -> None:
    engine = Driver(connector=FakeConnector)
    memory, connector = engine.worker.memory, engine.connector
    assert memory.stats().tag("kv_cache").hooks == 1
    hooks_at_end = []
    engine.worker.shutdown = lambda: hooks_at_end.append(memory.stats().tag("kv_cache").hooks)  # type: ignore[method-assign]
    engine.core.shutdown()
    assert hooks_at_end == [0]
    assert connector.calls == ["register", "shutdown"]
    memory.close()


def test_e5_closing_a_subscription_twice_is_once(engine: Driver) -> None:
    memory, connector = engine.worker.memory, FakeConnectorWorker()
    subscription = subscribe(FakeConnector, connector, memory, "second")
    assert subscription.active
    subscription.close()
    subscription.close()
    memory.sleep({"kv_cache": "discard"})
    assert connector.calls == []
    memory.wake()


def test_e3_metadata_is_published_anew_before_admission_opens(engine: Driver) -> None:
    published = engine.connector_scheduler.metadata
    assert published == [engine.connector.get_handshake_metadata()]
    engine.slept(level=1)
    assert published[-1] is None, "while released there is nothing to connect to"
    engine.woken()
    assert published[-1] == engine.connector.get_handshake_metadata()
    assert published[-1] not in (None, published[0])
    engine.add("a", 1, hand_off=True)
    engine.settle_hand_off()
    params = engine.ends["a"].kv_transfer_params
    assert params is not None
    assert params["epoch"] == str(engine.connector.epoch())
