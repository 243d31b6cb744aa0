"""E4 with a real engine and a small model, for every registered connector: one that does not say that it follows a sleep is
refused where that matters, and nowhere else; one that says so sleeps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed_connectors import NAMES, case, needs
from tiny_models import save_tiny

from torpor.connectors.config import ConnectorConfig
from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.engine.core import EngineCore
from torpor.engine.startup import start_core
from torpor.engine.tickets import Ticket
from torpor.errors import ConnectorError, ModelError
from torpor.kvcache.config import CacheConfig
from torpor.memory import MemoryConfig
from torpor.memory.types import Residency
from torpor.models.config import ModelConfig
from torpor.request import GenerationRequest, SamplingParams

POOLS, SLEEPS = SleepConfig(enable_pools=True), SleepConfig(enable_sleep_mode=True)
NUMBERS = itertools.count()
RELEASE = {"kv_cache": "discard"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


def config(name: str, sleep: SleepConfig, model: Path, folder: Path, *, deaf: bool) -> EngineConfig:
    extra = _placed(case(name).extra, str(folder))
    connector = name
    if deaf:
        connector = f"deaf_connectors:{name}"
    if deaf and name == "multi":
        connector, extra = "multi", {"connectors": ["deaf_connectors:ipc"]}
    return EngineConfig(
        model=ModelConfig(source=str(model), dtype="float32"),
        cache=CacheConfig(num_blocks=16, block_size=4),
        memory=MemoryConfig(driver="host"),
        sleep=sleep,
        connector=ConnectorConfig(connector=connector, extra=extra),
    )


def _placed(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _placed(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_placed(inner, folder) for inner in value]
    return value.replace("{folder}", folder) if isinstance(value, str) else value


@contextlib.contextmanager
def running(config: EngineConfig) -> Iterator[EngineCore]:
    core = start_core(config)
    try:
        yield core
    finally:
        core.shutdown()


def done(core: EngineCore, ticket: Ticket) -> dict[str, Any]:
    while not ticket.done():
        core.step()
    found: dict[str, Any] = ticket.result(0)
    return found


def answer(core: EngineCore) -> list[int]:
    name = f"r{next(NUMBERS)}"
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    core.add(GenerationRequest(request_id=name, prompt_token_ids=[5, 6, 7, 8, 9], sampling=sampling))
    tokens: list[int] = []
    while True:
        for output in core.step():
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                return tokens


@pytest.mark.parametrize("name", NAMES)
def test_e4_with_sleep_mode_it_is_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConnectorError, match="does not support sleep mode") as caught:
        start_core(config(name, SLEEPS, tmp_path / "no model here", tmp_path, deaf=True))
    assert caught.value.fields["setting"] == "enable_sleep_mode"
    assert name in caught.value.fields["connector"]
    with pytest.raises(ModelError):
        start_core(config(name, SLEEPS, tmp_path / "no model here", tmp_path, deaf=False))


@pytest.mark.parametrize("name", NAMES)
def test_e4_with_pools_only_it_is_refused_by_what_would_unmap(name: str, tmp_path: Path, model: Path) -> None:
    needs(name, str(tmp_path))
    with running(config(name, POOLS, model, tmp_path, deaf=True)) as core:
        said = answer(core)
        epoch = core.stats().connector.epoch  # type: ignore[union-attr]
        asked = [
            lambda: core.sleep(SleepRequest(level=1, mode="wait")),
            lambda: core.sleep(SleepRequest(level=2, mode="wait")),
            lambda: core.sleep(SleepRequest(policies=RELEASE, mode="wait")),
            core.release_kv_cache_memory,
        ]
        for ask in asked:
            with pytest.raises(ConnectorError, match="nothing was unmapped"):
                done(core, ask())
        stats = core.stats()
        assert all(tag.residency is Residency.RESIDENT for tag in stats.memory.tags)
        assert stats.connector is not None
        assert (core.state, stats.connector.epoch) == (EngineState.AWAKE, epoch)
        assert done(core, core.sleep(SleepRequest(level=0, mode="wait")))["state"] == "paused"
        done(core, core.resume())
        assert done(core, core.pause("wait"))["state"] == "paused"
        done(core, core.resume())
        assert answer(core) == said


@pytest.mark.parametrize("name", NAMES)
def test_e4_one_that_follows_sleeps_and_answers_as_before(name: str, tmp_path: Path, model: Path) -> None:
    needs(name, str(tmp_path))
    with running(config(name, SLEEPS, model, tmp_path, deaf=False)) as core:
        said = answer(core)
        for level in (1, 2):
            report = done(core, core.sleep(SleepRequest(level=level, mode="wait")))
            assert report["unmapped_bytes"] == report["returned_bytes"] > 0
            assert core.stats().connector.epoch is None  # type: ignore[union-attr]
            done(core, core.wake_up())
            assert answer(core) == said
