"""``lmcache``: what LMCache keeps comes back right or not at all, its buffer never sleeps, and other weights find nothing."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from connector_pairs import Background, Gate, needs
from store_driver import LONG, OTHER, StoreDriver, told

from torpor.connectors import get_connector
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.lmcache import LMCacheConnector, LMCacheOptions, LMCacheStore, SharedLMCacheConnector
from torpor.connectors.lmcache_engine import Engine, load_package, words_of
from torpor.errors import ConfigurationError, ConnectorError, TransportError
from torpor.memory.types import Residency

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

NAMES = [bytes([i]) * 32 for i in range(1, 9)]


@pytest.fixture
def engine() -> Iterator[StoreDriver]:
    needs("lmcache")
    driver = StoreDriver("lmcache", extra={"host_bytes": 16 << 20})
    yield driver
    driver.close()


class TestKeeping:
    @pytest.mark.parametrize("level", [1, 2])
    def test_eight_new_requests_are_right_after_each_of_two_wakes(self, engine: StoreDriver, level: int) -> None:
        prompts = [[*LONG[:16], n, *OTHER[: 12 + n]] for n in range(8)]
        right = [told(prompt) for prompt in prompts]
        assert [engine.answer(f"first{n}", prompt=p) for n, p in enumerate(prompts)] == right
        for cycle in range(2):
            engine.slept(level=level)
            engine.woken()
            answers = [engine.answer(f"{cycle}-{n}", prompt=p) for n, p in enumerate(prompts)]
            assert answers == right, f"{sum(a == b for a, b in zip(answers, right, strict=True))}/8 identical"
            assert all(engine.cached(f"{cycle}-{n}") >= 24 for n in range(8))
        stats = engine.side.stats()
        assert (stats.connector, stats.loads_failed) == ("lmcache", 0)
        assert stats.loads_done >= 9

    def test_only_what_the_prefix_cache_lacks_is_loaded(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        engine.forget()
        engine.answer("b", prompt=LONG[:10])
        assert engine.answer("c", prompt=LONG) == told(LONG)
        assert engine.cached("c") == 40
        assert engine.figures.loaded_blocks == 2 + 8

    def test_what_is_full_gives_up_and_stays_right(self) -> None:
        needs("lmcache")
        small = StoreDriver("lmcache", extra={"host_bytes": 1 << 20})
        for n in range(300):
            small.answer(f"a{n}", 1, prompt=[n % 251, *OTHER])
        small.forget()
        for n in (0, 150, 299):
            prompt = [n % 251, *OTHER]
            assert small.answer(f"b{n}", prompt=prompt) == told(prompt)
        small.close()

    def test_lookups_that_fail_cost_a_hit_and_are_told_once(
        self, engine: StoreDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.answer("a", prompt=LONG)
        engine.forget()

        def fail(*args: Any) -> int:
            raise TransportError("told to fail", transport="lmcache")

        monkeypatch.setattr(Engine, "lookup", fail)
        assert engine.answer("b", prompt=LONG) == told(LONG)
        assert sum("not looked up" in r.message for r in caplog.records) == 1
        monkeypatch.undo()
        engine.forget()
        assert engine.answer("c", prompt=LONG) == told(LONG)
        assert engine.cached("c") == 40

    def test_blocks_that_do_not_arrive_are_computed(self, engine: StoreDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        engine.answer("a", prompt=LONG)
        engine.forget()
        monkeypatch.setattr(Engine, "retrieve", lambda *args: 3)
        assert engine.answer("b", prompt=LONG) == told(LONG)
        assert engine.side.stats().loads_failed == 1


class TestSleeping:
    def test_e1_its_buffer_lies_in_no_pool_and_survives(self, engine: StoreDriver) -> None:
        """It is taken while registering: the pools hold the engine's own tensors and nothing else."""
        held = {tag.tag: tag.allocated_bytes for tag in engine.worker.memory.stats().tags}
        other = StoreDriver("offload", engine_id="plain")
        assert held == {tag.tag: tag.allocated_bytes for tag in other.worker.memory.stats().tags}
        other.close()
        engine.answer("a", prompt=LONG)
        engine.slept(level=2)
        assert isinstance(engine.store, LMCacheStore)
        assert engine.store.held_tokens(LONG[:40]) == 40, "asleep, and LMCache has it"
        engine.woken()

    def test_nothing_is_unmapped_while_lmcache_reads(self, engine: StoreDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = Gate()
        monkeypatch.setattr(Engine, "store", gate.before(Engine.store))
        engine.add("a", max_tokens=1, prompt=LONG)
        while not gate.reached.is_set():
            engine.step()
        sleeping = Background(lambda: engine.worker.memory.sleep({"kv_cache": "discard"}))
        assert not sleeping.ended_within(0.2)
        assert engine.worker.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
        gate.open()
        sleeping.result()
        assert engine.figures.saved_blocks == 10
        engine.worker.memory.wake()


class TestWeights:
    def test_e6_after_an_update_no_old_kv_is_served(self, engine: StoreDriver) -> None:
        engine.answer("a", prompt=LONG)
        engine.worker.weights += 1
        engine.core.set_weights_version("fake@2")
        new = engine.answer("b", prompt=LONG)
        assert new != told(LONG)
        assert engine.cached("b") == 0
        assert engine.figures.loaded_blocks == 0

    def test_words_are_of_the_whole_name(self) -> None:
        words = words_of(NAMES[:2], 4)
        assert len(words) == 8
        assert len(set(words[:4])) == 1
        assert all(0 <= word < 1 << 63 for word in words)
        changed = [NAMES[0][:31] + b"\x7f"]
        assert words_of(changed, 4) != words_of(NAMES[:1], 4)
        assert words_of(NAMES[:1], 6)[4:] == [0, 0]
        assert len(words_of(NAMES[:3], 1)) == 3


class TestSettings:
    @pytest.mark.parametrize(
        ("extra", "setting"),
        [
            ({"host_bytes": 0}, "host_bytes"),
            ({"host_bytes": 100}, "host_bytes"),
            ({"remote_url": "redis://x"}, "remote_url"),
            ({"remote_url": 3}, "remote_url"),
            ({"chunk_size": 256}, "chunk_size"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name(self, extra: dict[str, Any], setting: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            StoreDriver("lmcache", extra=extra)
        assert caught.value.fields["setting"] == setting

    def test_without_its_package_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name == "lmcache" or name.startswith("lmcache.")] or ["lmcache"]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, "lmcache", None)
        with pytest.raises(ConnectorError, match=r"pip install 'torpor\[lmcache\]'"):
            load_package()
        with pytest.raises(ConnectorError, match="lmcache"):
            StoreDriver("lmcache")

    def test_with_a_remote_it_reaches_other_processes(self) -> None:
        assert get_connector("lmcache") is LMCacheConnector
        alone = ConnectorConfig(connector="lmcache")
        shared = ConnectorConfig(connector="lmcache", extra={"remote_url": "lm://127.0.0.1:1"})
        assert LMCacheConnector.configured(alone).reach == "engine"
        assert LMCacheConnector.configured(shared) is SharedLMCacheConnector
        assert LMCacheOptions.of(shared).remote_url == "lm://127.0.0.1:1"

    def test_this_process_starts_others_as_before(self, engine: StoreDriver) -> None:
        """LMCache sets "spawn" for the whole process."""
        assert multiprocessing.get_start_method(allow_none=True) != "spawn"
