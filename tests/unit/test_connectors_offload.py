"""``offload``: what was kept comes back right or not at all, sleeps wait for copies under way, and other weights find nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_pairs import WAIT_S, Background, Gate
from store_driver import LONG, OTHER, StoreDriver, told

from torpor.connectors import ConnectorConfig, get_connector, mover
from torpor.connectors.offload import OffloadConnector, OffloadStore
from torpor.connectors.store import StoreScheduler, shared_store
from torpor.engine.base import EngineState
from torpor.errors import BugError, ConfigurationError, DeviceError, HostMemoryError, SleepAborted, StateError
from torpor.memory.types import Residency
from torpor.request import FinishReason
from torpor.testing.engine import FakeWorker

BLOCK = 64  # bytes of FakeWorker's block: K and V of 4 tokens, 2 numbers of 4 bytes each


@pytest.fixture
def engine() -> Iterator[StoreDriver]:
    driver = StoreDriver()
    yield driver
    driver.close()


class TestKeeping:
    @pytest.mark.parametrize("level", [1, 2])
    def test_kept_kv_survives_a_sleep(self, engine: StoreDriver, level: int) -> None:
        first = engine.answer("a", prompt=LONG)
        for round_ in range(2):
            engine.slept(level=level)
            engine.woken()
            assert engine.answer(f"b{round_}", prompt=LONG) == first == told(LONG)
            assert engine.cached(f"b{round_}") == 40
        stats = engine.side.stats()
        assert (stats.loads_done, stats.loads_failed, stats.bytes_received) == (2, 0, 2 * 10 * BLOCK)
        assert stats.store is not None
        assert (stats.store.saved_blocks, stats.store.loaded_blocks, stats.store.host_blocks) == (10, 20, 10)

    def test_a_beginning_that_is_kept_is_enough(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        engine.forget()
        prompt = [*LONG[:17], *OTHER[:10]]
        assert engine.answer("b", prompt=prompt) == told(prompt)
        assert engine.cached("b") == 16

    def test_only_what_the_prefix_cache_lacks_is_loaded(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        engine.forget()
        engine.answer("b", prompt=LONG[:10])
        assert engine.answer("c", prompt=LONG) == told(LONG)
        assert engine.cached("c") == 40
        assert engine.figures.loaded_blocks == 2 + 8

    def test_the_last_token_is_always_computed(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG[:40])
        engine.forget()
        assert engine.answer("b", prompt=LONG[:40]) == told(LONG[:40])
        assert engine.cached("b") == 36

    def test_what_is_kept_is_not_kept_again(self, engine: StoreDriver) -> None:
        for name in "abc":
            engine.answer(name, prompt=LONG)
            engine.forget()
        assert engine.figures.saved_blocks == 10

    def test_a_request_that_ends_as_the_sleep_begins_is_kept(self, engine: StoreDriver) -> None:
        """No step comes between the end of the request and the sleep: the release takes the order from the desk."""
        engine.add("a", max_tokens=2, prompt=LONG)
        engine.step()
        ticket = engine.sleep(level=1, mode="wait")
        while engine.state is EngineState.DRAINING:
            engine.step()
        assert (engine.state, engine.figures.saved_blocks, len(engine.store._desk)) == (EngineState.SLEEPING, 0, 1)
        engine.settle()
        assert ticket.result(0)["state"] == "asleep"
        engine.woken()
        assert engine.answer("b", prompt=LONG) == told(LONG)
        assert engine.cached("b") == 40

    def test_an_aborted_request_is_not_kept(self, engine: StoreDriver) -> None:
        engine.add("a", max_tokens=20, prompt=LONG)
        engine.step(3)
        engine.core.abort(["a"])
        engine.settle()
        assert engine.figures.host_blocks == 0

    def test_a_prompt_without_a_full_block_is_nothing_to_keep(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG[:3])
        assert engine.figures.saved_blocks == 0

    @pytest.mark.parametrize(("role", "saved", "cached"), [("producer", 10, 0), ("consumer", 0, 0), ("both", 10, 40)])
    def test_roles(self, role: str, saved: int, cached: int) -> None:
        engine = StoreDriver(role=role)
        engine.answer("a", prompt=LONG)
        engine.forget()
        assert engine.answer("b", prompt=LONG) == told(LONG)
        assert (engine.figures.saved_blocks, engine.cached("b")) == (saved, cached)
        engine.close()


class TestRoom:
    def test_the_block_unused_for_longest_is_given_up(self) -> None:
        engine = StoreDriver(extra={"host_bytes": 20 * BLOCK})
        engine.answer("a", prompt=LONG)
        engine.answer("b", prompt=OTHER)
        engine.forget()
        engine.answer("a again", prompt=LONG)  # the older one is the newer now
        third = [*range(60, 80)]
        engine.answer("c", prompt=third)
        engine.forget()
        assert engine.answer("a third", prompt=LONG) == told(LONG)
        assert engine.cached("a third") == 40
        assert engine.answer("b again", prompt=OTHER) == told(OTHER)
        assert engine.cached("b again") == 20, "the end of a text is given up before its beginning"
        assert engine.figures.evicted_blocks == 5 + 5
        engine.close()

    def test_of_a_prompt_that_does_not_fit_the_beginning_is_kept(self) -> None:
        engine = StoreDriver(extra={"host_bytes": 4 * BLOCK})
        engine.answer("a", prompt=LONG)
        assert (engine.figures.host_blocks, engine.figures.skipped_blocks) == (4, 6)
        engine.forget()
        assert engine.answer("b", prompt=LONG) == told(LONG)
        assert engine.cached("b") == 16
        engine.close()

    def test_a_block_that_went_before_it_was_read_is_computed(self, engine: StoreDriver) -> None:
        """P5: the store said that it has it, and then had not."""
        engine.answer("a", prompt=LONG)
        engine.forget()
        engine.add("b", prompt=LONG)
        plain, engine.worker.execute = engine.worker.execute, _first(engine, engine.worker.execute)  # type: ignore[method-assign]
        engine.settle()
        assert engine.tokens["b"] == told(LONG)
        assert engine.side.stats().loads_failed == 1
        engine.worker.execute = plain  # type: ignore[method-assign]


def _first(engine: StoreDriver, execute: Any) -> Any:
    def emptied(output: Any) -> Any:
        assert isinstance(engine.store, OffloadStore)
        engine.store._host.clear()
        return execute(output)

    return emptied


class TestSleeping:
    def test_e1_its_buffer_lies_in_no_pool(self, engine: StoreDriver) -> None:
        assert isinstance(engine.store, OffloadStore)
        buffer = engine.store._host._buffer
        assert buffer is not None
        assert engine.worker.memory.tag_of(buffer) is None
        engine.slept(level=1)
        buffer.fill_(7)
        assert (buffer == 7).all()

    def test_e5_it_follows_the_mapping_and_has_a_new_epoch(self, engine: StoreDriver) -> None:
        seen = {engine.side.epoch()}
        for _ in range(2):
            engine.slept(level=1)
            assert engine.side.epoch() is None
            assert engine.side.get_handshake_metadata() is None
            engine.woken()
            seen.add(engine.side.epoch())
        assert len(seen) == 3
        assert None not in seen

    def test_nothing_is_unmapped_while_a_copy_reads(self, engine: StoreDriver) -> None:
        gate = Gate()
        device = engine.worker.memory.device
        device.copy = gate.before(device.copy)  # type: ignore[method-assign]
        engine.add("a", max_tokens=1, prompt=LONG)
        while not gate.reached.is_set():
            engine.step()
        sleeping = Background(lambda: engine.worker.memory.sleep({"kv_cache": "discard"}))
        assert not sleeping.ended_within(0.2)
        assert engine.worker.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
        gate.open()
        sleeping.result()
        assert engine.worker.memory.stats().tag("kv_cache").residency is Residency.ASLEEP
        assert engine.figures.saved_blocks == 10
        engine.worker.memory.wake()

    def test_what_a_release_took_is_told(self, engine: StoreDriver) -> None:
        assert engine.side.stats().release_s == 0
        engine.forget()
        assert engine.side.stats().release_s > 0

    def test_a_copy_that_does_not_end_stops_the_sleep(self) -> None:
        engine = StoreDriver(withdraw_timeout_s=0.1)
        gate = Gate()
        device = engine.worker.memory.device
        plain = device.copy
        device.copy = gate.before(plain)  # type: ignore[method-assign]
        engine.add("a", max_tokens=1, prompt=LONG)
        while not gate.reached.is_set():
            engine.step()
        ticket = engine.sleep(level=1)
        deadline = time.monotonic() + WAIT_S
        while not ticket.done() and time.monotonic() < deadline:
            engine.background.run()
            engine.step()
        with pytest.raises(SleepAborted, match="withdraw_timeout_s"):
            ticket.result(0)
        assert engine.state is EngineState.AWAKE
        gate.open()
        device.copy = plain  # type: ignore[method-assign]
        assert engine.answer("b", prompt=LONG) == told(LONG)
        assert engine.slept(level=1)["state"] == "asleep"
        engine.close()

    def test_p1_what_was_ordered_before_a_sleep_is_not_copied_after_it(self, engine: StoreDriver) -> None:
        """Its blocks hold something else by then."""
        engine.add("a", max_tokens=1, prompt=LONG)
        engine.step()
        metadata = engine.core._connector.build_connector_meta()  # type: ignore[union-attr]
        assert metadata.saves
        engine.slept(level=1)
        engine.woken()
        engine.side.start_load_kv(metadata)
        assert engine.side.get_finished().sending == {"a"}
        assert engine.figures.saved_blocks == 0

    def test_a_load_that_is_cancelled_writes_nothing_more(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        engine.forget()
        gate = Gate()
        device = engine.worker.memory.device
        device.copy = gate.before(device.copy)  # type: ignore[method-assign]
        engine.add("b", prompt=LONG)
        while not gate.reached.is_set():
            engine.step()
        engine.core.abort(["b"])
        engine.step(5)
        assert engine.ends["b"].finish_reason is FinishReason.ABORT
        assert engine.core.stats().scheduler.cancelling == 1, "its blocks may still be written to"
        gate.open()
        engine.settle()
        assert engine.core.stats().cache.allocated_blocks == 0
        assert engine.side.stats().loads_failed == 1

    def test_a_failing_copy_costs_what_it_would_have_kept(self, engine: StoreDriver) -> None:
        device = engine.worker.memory.device
        plain = device.copy

        def fail(*args: Any, **kwargs: Any) -> None:
            raise DeviceError("told to fail", operation="copy", code=5)

        device.copy = fail  # type: ignore[method-assign]
        assert engine.answer("a", prompt=LONG) == told(LONG)
        assert (engine.figures.host_blocks, engine.figures.saved_blocks) == (0, 0)
        device.copy = plain  # type: ignore[method-assign]
        engine.forget()
        engine.answer("b", prompt=LONG)
        engine.forget()
        device.copy = fail  # type: ignore[method-assign]
        assert engine.answer("c", prompt=LONG) == told(LONG)
        assert engine.side.stats().loads_failed == 1
        device.copy = plain  # type: ignore[method-assign]


class TestWeights:
    def test_e6_other_weights_find_nothing(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        engine.worker.weights += 1
        engine.core.set_weights_version("fake@2")
        worker = FakeWorker()
        reference = StoreDriver(engine_id="R", worker=worker)
        worker.weights += 1
        assert engine.answer("b", prompt=LONG) == reference.answer("r", prompt=LONG) != told(LONG)
        assert engine.cached("b") == 0
        engine.forget()
        engine.worker.weights.copy_(worker.weights)
        assert engine.answer("c", prompt=LONG) == reference.tokens["r"]
        assert engine.cached("c") == 40
        engine.close()
        reference.close()

    def test_e6_it_reaches_a_store_among_several(self) -> None:
        children = ["torpor.testing.connectors:MemoryConnector", {"kv_connector": "offload"}]
        engine = StoreDriver("multi", extra={"connectors": children})
        engine.answer("a", prompt=LONG)
        engine.forget()
        assert engine.answer("b", prompt=LONG) == told(LONG)
        assert engine.cached("b") == 40
        engine.core.set_weights_version("fake@2")
        engine.forget()
        engine.answer("c", prompt=LONG)
        assert engine.cached("c") == 0
        engine.close()

    def test_e6_kv_that_was_ordered_with_older_weights_is_not_kept(self, engine: StoreDriver) -> None:
        engine.add("a", max_tokens=1, prompt=LONG)
        engine.step()
        metadata = engine.core._connector.build_connector_meta()  # type: ignore[union-attr]
        engine.store.set_version("fake@2")
        engine.side.start_load_kv(metadata)
        assert engine.side._mover is not None
        assert engine.side._mover.wait_idle(time.monotonic() + WAIT_S)
        assert (engine.figures.saved_blocks, engine.figures.host_blocks) == (0, 0)

    def test_a_request_with_blocks_forbids_the_change(self, engine: StoreDriver) -> None:
        engine.add("a", max_tokens=20, prompt=LONG)
        engine.step(2)
        with pytest.raises(StateError, match="a"):
            engine.core.set_weights_version("fake@2")
        assert engine.store.version == "fake@1"
        engine.settle()

    def test_the_same_version_changes_nothing(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        engine.store.set_version("fake@1")
        assert engine.figures.host_blocks == 10


class TestSettings:
    @pytest.mark.parametrize(
        ("extra", "setting"),
        [
            ({"host_bytes": 0}, "host_bytes"),
            ({"host_bytes": "lots"}, "host_bytes"),
            ({"host_bytes": 2 * BLOCK - 1}, "host_bytes"),
            ({"host_bytes": True}, "host_bytes"),
            ({"disk_bytes": 1 << 20}, "disk_dir"),
            ({"disk_dir": ""}, "disk_dir"),
            ({"disk_dir": 3}, "disk_dir"),
            ({"disk_dir": "/tmp", "disk_bytes": BLOCK}, "disk_bytes"),
            ({"disk_dir": "/proc/no"}, "disk_dir"),
            ({"disk_dir": "/dev/null"}, "disk_dir"),
            ({"max_peers": 4}, "max_peers"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name(self, extra: dict[str, Any], setting: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            StoreDriver(extra=extra)
        assert caught.value.fields["setting"] == setting

    def test_more_host_memory_than_there_is(self) -> None:
        with pytest.raises(HostMemoryError, match="host_bytes"):
            StoreDriver(extra={"host_bytes": 1 << 60})

    def test_an_unknown_role(self) -> None:
        with pytest.raises(ConfigurationError, match="kv_role"):
            StoreDriver(role="all")

    @pytest.mark.parametrize("what", ["do_remote_prefill", "do_remote_decode"])
    def test_it_hands_nothing_over(self, engine: StoreDriver, what: str) -> None:
        """What asks for a transfer is the business of a connector beside it (``multi``)."""
        engine.add("a", max_tokens=8, prompt=LONG, **{what: True})
        engine.settle()
        assert engine.tokens["a"] == told(LONG)
        assert engine.ends["a"].kv_transfer_params is None

    def test_by_its_name(self) -> None:
        found = get_connector("offload")
        assert found is OffloadConnector
        assert found.supports_sleep_mode

    def test_both_sides_have_one_store_and_two_engines_have_two(self) -> None:
        one, two = StoreDriver(engine_id="one"), StoreDriver(engine_id="two")
        scheduler_side = one.core._connector
        assert isinstance(scheduler_side, StoreScheduler)
        assert scheduler_side._store is one.store is not two.store
        one.close()
        two.close()

    def test_two_engines_of_a_process_with_one_id(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        with pytest.raises(ConfigurationError, match="engine_id"):
            StoreDriver()
        engine.forget()
        engine.answer("b", prompt=LONG)
        assert engine.cached("b") == 40, "the first one goes on"

    def test_a_restarted_engine_has_a_store_of_its_own(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        engine.close()
        again = StoreDriver()
        assert again.figures.host_blocks == 0
        again.close()

    def test_a_store_without_an_engine_id_is_a_bug(self) -> None:
        with pytest.raises(BugError):
            shared_store(ConnectorConfig(connector="offload"), "offload", lambda: pytest.fail("made"))

    def test_a_folder_that_others_can_write_to(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        with pytest.raises(ConfigurationError, match="nobody else"):
            StoreDriver(extra={"disk_dir": str(tmp_path)})


def test_nothing_is_kept_in_a_buffer_that_was_given_back_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that hangs while the engine shuts down, and comes to later."""
    monkeypatch.setattr(mover, "JOIN_S", 0.05)
    engine = StoreDriver(withdraw_timeout_s=0.05)
    store, copied = engine.store, list[Any]()
    assert isinstance(store, OffloadStore)
    monkeypatch.setattr(store, "save", lambda order: copied.append(order))
    gate, moving = Gate(), engine.side._live_mover
    monkeypatch.setattr(moving, "_settle", gate.before(lambda: None))
    engine.add("a", max_tokens=1, prompt=LONG)
    while not gate.reached.is_set():
        engine.step()
    engine.close()
    assert store._host._buffer is None
    gate.open()
    moving._thread.join(WAIT_S)
    assert not moving._thread.is_alive()
    assert copied == []
