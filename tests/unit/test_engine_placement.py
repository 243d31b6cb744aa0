"""E1 with the real worker and a small real model: what lies in which pool, and whether the connector's tensors are the
runner's own, before and after a sleep of level 1 and 2."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import save_model, tiny_engine

from torpor.connectors.config import ConnectorConfig
from torpor.engine import lifecycle_parts
from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.core import EngineCore
from torpor.engine.executor import UniprocExecutor
from torpor.engine.startup import start_core
from torpor.engine.worker import Worker
from torpor.errors import ConnectorError, ModelError
from torpor.request import EngineOutput, GenerationRequest, SamplingParams
from torpor.testing.engine import FakeConnector, FakeConnectorWorker

FOLLOWS = ConnectorConfig(connector="torpor.testing.engine:FakeConnector")
FIXED = ConnectorConfig(connector="torpor.testing.engine:FixedConnector")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def core(folder: Path) -> Iterator[EngineCore]:
    core = start_core(tiny_engine(folder, connector=FOLLOWS))
    yield core
    core.shutdown()


def worker_of(core: EngineCore) -> Worker:
    executor = core.executor
    assert isinstance(executor, UniprocExecutor)
    assert isinstance(executor.worker, Worker)
    return executor.worker


def connector_of(core: EngineCore) -> FakeConnectorWorker:
    return FakeConnector.workers[-1]


def done(core: EngineCore, ticket: Future[dict[str, Any]]) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while not ticket.done() and time.monotonic() < deadline:
        core.step()
        time.sleep(0.001)
    return ticket.result(0)


def answer(core: EngineCore, request_id: str, prompt: str = "placement") -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=12)
    core.add(GenerationRequest(request_id=request_id, prompt_token_ids=list(prompt.encode()), sampling=sampling))
    outputs: list[EngineOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += core.step()
    assert outputs[-1].error is None
    return [t for output in outputs for t in output.new_token_ids]


def placement(core: EngineCore) -> dict[str, set[str | None]]:
    worker, connector = worker_of(core), connector_of(core)
    memory, runner = worker.memory, worker._runner
    assert runner is not None
    assert connector.buffer is not None
    inputs = runner.tensors["runtime"]
    return {
        "parameters": {memory.tag_of(p) for p in worker.model.module.parameters()},
        "runner inputs": {memory.tag_of(t) for t in inputs},
        "KV cache": {memory.tag_of(t) for t in runner.kv_caches},
        "connector buffer": {memory.tag_of(connector.buffer)},
    }


WANTED = {"parameters": {"weights"}, "runner inputs": {"runtime"}, "KV cache": {"kv_cache"}, "connector buffer": {None}}


@pytest.mark.parametrize("level", [1, 2])
def test_e1_everything_lies_in_its_pool_and_the_connector_has_the_runner_s_own_tensors(core: EngineCore, level: int) -> None:
    worker, connector = worker_of(core), connector_of(core)
    runner = worker._runner
    assert runner is not None
    assert placement(core) == WANTED
    assert [id(t) for t in connector.kv_caches.values()] == [id(t) for t in runner.kv_caches]
    addresses = {t.data_ptr() for t in runner.kv_caches}
    weights = [p.clone() for p in worker.model.module.parameters()]
    assert connector.buffer is not None
    connector.buffer.fill_(3.0)
    before = answer(core, "before")

    done(core, core.sleep(SleepRequest(level=level)))
    assert worker.memory.stats().mapped_bytes == 0, "nothing but the pools is mapped, and they all sleep"
    assert connector.buffer.min() == connector.buffer.max() == 3.0
    done(core, core.wake_up())

    assert placement(core) == WANTED
    assert {t.data_ptr() for t in runner.kv_caches} == addresses
    assert all(torch.equal(now, then) for now, then in zip(worker.model.module.parameters(), weights, strict=True))
    assert connector.calls == ["register", "release", "restore"]
    assert answer(core, "after") == before
    worker.memory.check_integrity()
    core.scheduler.check_integrity()


def test_e2_level_2_really_loses_the_weights_until_they_are_read_again(core: EngineCore) -> None:
    """The same answers alone would not prove it: a library may keep copies of its own."""
    worker = worker_of(core)
    done(core, core.sleep(SleepRequest(level=2)))
    worker.memory.wake(["weights"])
    assert all(not p.any() for p in worker.model.module.parameters())
    done(core, core.wake_up())
    assert all(p.any() for p in worker.model.module.parameters())


def test_e4_a_connector_that_cannot_follow_is_refused_before_the_model_is_looked_at() -> None:
    with pytest.raises(ConnectorError, match=r"FixedConnector.*sleep mode"):
        start_core(tiny_engine(Path("/nowhere"), connector=FIXED))
    with pytest.raises(ModelError):
        start_core(tiny_engine(Path("/nowhere"), connector=FOLLOWS))


def test_a_source_that_changed_while_the_engine_slept_is_found(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    core = start_core(tiny_engine(copy))
    done(core, core.sleep(SleepRequest(level=2)))
    file = next(copy.glob("*.safetensors"))
    good = file.read_bytes()
    file.write_bytes(good[:-8] + b"\x01\x02\x03\x04\x05\x06\x07\x08")
    with pytest.raises(ModelError):
        done(core, core.wake_up())
    assert core.stats().missing_tags == ("weights",)
    file.write_bytes(good)
    assert done(core, core.wake_up())["state"] == "awake"
    core.shutdown()


def test_a_start_up_that_fails_gives_everything_back(folder: Path) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        start_core(tiny_engine(folder, num_blocks=0))


def test_a_wake_that_does_not_end_says_where_it_is(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again, until it ends after all; the loop steps for it and goes on answering."""
    monkeypatch.setattr(lifecycle_parts, "TELL_S", 0.05)
    done(core, core.sleep(SleepRequest(level=1)))
    goes_on, told = threading.Event(), []

    def the_hook_that_hangs() -> None:
        assert goes_on.wait(30)

    unregister = worker_of(core).memory.register_tag_hooks("kv_cache", after_map=the_hook_that_hangs)
    try:
        ticket, deadline = core.wake_up(), time.monotonic() + 20
        while len(told) < 3 and time.monotonic() < deadline:
            core.step()
            time.sleep(min(core.wait_s() or 0.0, 0.05))
            told = [record.getMessage() for record in caplog.records if "not ended yet" in record.getMessage()]
        assert len(told) >= 3
        assert not ticket.done()
        assert core.state is EngineState.WAKING
        goes_on.set()
        assert done(core, ticket)["state"] == "awake"
    finally:
        goes_on.set()
        unregister()
    assert all(text.startswith("waking for ") for text in told)
    assert all(
        "memory.memory.wake > " in text and text.index("memory.hooks.") < text.index("the_hook_that_hangs") for text in told
    )
    core.step()
    assert core.wait_s() is None, "nothing is left to tell"


def test_a_shutdown_that_waits_for_a_wake_says_what_it_waits_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle_parts, "TELL_S", 0.05)
    core = start_core(tiny_engine(folder))
    done(core, core.sleep(SleepRequest(level=1)))
    goes_on = threading.Event()

    def the_hook_that_hangs() -> None:
        assert goes_on.wait(30)

    worker_of(core).memory.register_tag_hooks("kv_cache", after_map=the_hook_that_hangs)
    core.wake_up()
    threading.Timer(0.5, goes_on.set).start()
    core.shutdown()
    assert goes_on.is_set()
    assert any("the_hook_that_hangs" in record.getMessage() for record in caplog.records)
