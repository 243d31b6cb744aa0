"""The worker: E1 (what lies in which pool), sizes of the KV cache, levels 1 and 2 (E2), and the connector's place in a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BLOCK, Driven, drive, make_worker, prompts, reference_greedy, save_tiny

from torpor.connectors.base import ConnectorMetadata, ConnectorStats, Finished, KVConnectorWorker, LoadRequest
from torpor.connectors.config import ConnectorConfig
from torpor.engine import worker as worker_module
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.engine.worker import HOST_KV_BYTES, Worker
from torpor.errors import ConfigurationError, DeviceMemoryError, ModelError, StateError
from torpor.kvcache.config import CacheConfig
from torpor.kvcache.types import BlockId, Epoch, KVCacheSpec
from torpor.memory import Content, Memory, MemoryConfig, sharing
from torpor.models import ModelConfig, resolve_model
from torpor.scheduler.output import SchedulerOutput

BYTES_PER_BLOCK = 2 * 3 * BLOCK * 2 * 16 * 4  # K and V, layers, tokens, kv heads, head size, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return path


@pytest.fixture
def loaded(folder: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    """A worker with its model and nothing else; the cache's configuration and the connector's by ``param``."""
    settings: dict[str, Any] = getattr(request, "param", {})
    config = EngineConfig(model=ModelConfig(source=str(folder), threads=1), **settings)
    made = Worker(config, resolve_model(config.model))
    made.load()
    yield made
    made.shutdown()


def cache(**settings: Any) -> dict[str, Any]:
    return {"cache": CacheConfig(block_size=BLOCK, **settings)}


class RecordingConnector(KVConnectorWorker):
    """Allocates while it registers, as transports do, and notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.finished = Finished()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec, memory: Memory) -> None:
        self.kv_caches, self.spec = kv_caches, spec
        self.buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        self.calls.append(f"load {[load.request_id for load in metadata.loads]}")

    def get_finished(self) -> Finished:
        self.calls.append("finished")
        return self.finished

    def release_kv_caches(self) -> None: ...

    def restore_kv_caches(self) -> None: ...

    def get_handshake_metadata(self) -> dict[str, Any] | None:
        return None

    def epoch(self) -> Epoch | None:
        return None

    def stats(self) -> ConnectorStats:
        raise NotImplementedError

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class LayerwiseConnector(RecordingConnector):
    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(f"wait {layer_name}")

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        assert kv_layer.data_ptr() == self.kv_caches[layer_name].data_ptr()
        self.calls.append(f"save {layer_name}")

    def wait_for_save(self) -> None:
        self.calls.append("wait for save")


def with_connector(folder: Path, connector: KVConnectorWorker) -> Worker:
    made = make_worker(folder)
    made.init_kv_connector(connector)
    return made


def test_e1_a_buffer_of_the_connectors_belongs_to_no_tag_and_survives(folder: Path) -> None:
    """Levels 1 and 2: the tensors it got are the runner's own and keep their addresses; its buffer keeps its bytes."""
    connector = RecordingConnector()
    worker = with_connector(folder, connector)
    try:
        memory = worker.memory
        assert memory.tag_of(connector.buffer) is None
        assert [memory.tag_of(t) for t in connector.kv_caches.values()] == ["kv_cache"] * 3
        assert worker._runner is not None
        addresses = [t.data_ptr() for t in worker._runner.kv_caches]
        connector.buffer.fill_(42)
        for weights in ("host", "discard"):
            memory.sleep({"weights": weights, "kv_cache": "discard", "runtime": "host"})
            assert bool((connector.buffer == 42).all())
            memory.wake()
            if weights == "discard":
                worker.reload_weights()
            assert [t.data_ptr() for t in connector.kv_caches.values()] == addresses
            assert [t.data_ptr() for t in worker._runner.kv_caches] == addresses
    finally:
        worker.shutdown()


@pytest.mark.parametrize("policies", [("host", "host"), ("discard", "host"), ("discard", "discard")])
def test_e2_answers_are_the_same_after_a_sleep(folder: Path, tmp_path: Path, policies: tuple[str, str]) -> None:
    model = save_tiny(tmp_path)
    [prompt] = prompts(19)
    expected = reference_greedy(model, prompt, 8)
    worker = make_worker(folder)
    try:
        for seed in range(2):
            sequence = Driven("a", prompt)
            drive(worker, [sequence], 8, seed=seed)
            assert sequence.output == expected
            worker.memory.sleep({"weights": policies[0], "runtime": policies[1], "kv_cache": "discard"})
            worker.memory.wake()
            lost = {t.tag for t in worker.memory.stats().tags if t.content is Content.LOST}
            assert lost == {"kv_cache"} | {tag for tag, p in zip(("weights", "runtime"), policies, strict=True) if p == "discard"}
            for tag, refill in (("weights", worker.reload_weights), ("runtime", worker.reset_runtime)):
                if tag in lost:
                    refill()
            worker.memory.mark_valid("kv_cache")
        sequence = Driven("a", prompt)
        drive(worker, [sequence], 8)
        assert sequence.output == expected
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        (cache(num_blocks=9), 9),
        (cache(kv_cache_bytes=10 * BYTES_PER_BLOCK + 5), 10),
        (cache(kv_cache_bytes=BYTES_PER_BLOCK), 1),
        (cache(), 64 * 256 // BLOCK),  # all that the longest possible batch can use
    ],
    indirect=["loaded"],
)
def test_num_blocks(loaded: Worker, expected: int) -> None:
    assert loaded.determine_num_blocks() == expected


@pytest.mark.parametrize("loaded", [cache()], indirect=True)
def test_the_default_size_follows_free_memory_up_to_a_limit(loaded: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "available_memory_bytes", lambda: 400 * BYTES_PER_BLOCK)
    assert loaded.determine_num_blocks() == 100
    monkeypatch.setattr(worker_module, "available_memory_bytes", lambda: 1 << 50)
    assert loaded._default_kv_bytes() == HOST_KV_BYTES
    monkeypatch.setattr(worker_module, "available_memory_bytes", lambda: 100)
    with pytest.raises(ConfigurationError, match="kv_cache_bytes 25 cannot hold one block"):
        loaded.determine_num_blocks()


@pytest.mark.parametrize("loaded", [cache(kv_cache_bytes=BYTES_PER_BLOCK - 1)], indirect=True)
def test_a_size_that_holds_no_block_names_its_setting(loaded: Worker) -> None:
    with pytest.raises(ConfigurationError, match=f"kv_cache_bytes {BYTES_PER_BLOCK - 1} cannot hold one block") as caught:
        loaded.determine_num_blocks()
    assert caught.value.setting == "kv_cache_bytes"


@pytest.mark.parametrize(
    ("loaded", "setting"),
    [(cache(kv_cache_bytes=1 << 50), "kv_cache_bytes"), (cache(num_blocks=1 << 40), "num_blocks")],
    indirect=["loaded"],
)
def test_a_size_that_the_device_does_not_have_names_its_setting(loaded: Worker, setting: str) -> None:
    with pytest.raises(DeviceMemoryError) as caught:
        loaded.initialize_kv_cache(loaded.determine_num_blocks())
    assert caught.value.setting == setting


@pytest.mark.parametrize("loaded", [cache() | {"connector": ConnectorConfig(connector="ipc")}, cache()], indirect=True)
def test_the_kv_cache_can_be_exported_exactly_when_there_is_a_connector(loaded: Worker) -> None:
    spec = loaded.initialize_kv_cache(5)
    assert spec.num_blocks == 5
    assert {tuple(t.shape) for t in loaded.kv_caches.values()} == {(2, 5, BLOCK, 2, 16)}
    settings = loaded.memory.pool("kv_cache").settings
    assert (settings.exportable, settings.guarded) == ((True, True) if loaded.config.connector else (False, False))


def test_calls_out_of_order_say_what_to_call(folder: Path) -> None:
    config = EngineConfig(model=ModelConfig(source=str(folder), threads=1))
    worker = Worker(config, resolve_model(config.model))
    try:
        with pytest.raises(StateError, match=r"call load\(\) first"):
            worker.determine_num_blocks()
        worker.load()
        with pytest.raises(StateError, match="loaded already"):
            worker.load()
        with pytest.raises(StateError, match=r"call initialize_kv_cache\(\) first"):
            worker.init_kv_connector(RecordingConnector())
        with pytest.raises(StateError, match=r"call initialize_kv_cache\(\) first"):
            worker.execute(SchedulerOutput(step=0, sequences=[]))
        worker.initialize_kv_cache(4)
        with pytest.raises(StateError, match="exists already"):
            worker.initialize_kv_cache(4)
    finally:
        worker.shutdown()
        worker.shutdown()


def test_a_step_starts_loads_and_gathers_what_finished(folder: Path) -> None:
    connector = RecordingConnector()
    worker = with_connector(folder, connector)
    try:
        load = LoadRequest(request_id="r", local_block_ids=[BlockId(1)], params={})
        result = worker.execute(SchedulerOutput(step=0, sequences=[], connector_metadata=ConnectorMetadata(loads=[load])))
        assert connector.calls == ["load ['r']", "finished"]
        assert result.finished_recving == frozenset()
        connector.finished = Finished(sending=frozenset("s"), recving=frozenset("r"), failed=frozenset("f"))
        result = worker.execute(
            SchedulerOutput(step=1, sequences=[Driven("a", [1]).take(1, [0])], connector_metadata=ConnectorMetadata())
        )
        assert connector.calls == ["load ['r']", "finished", "finished"]
        assert (result.finished_sending, result.finished_recving, result.failed_recving) == ({"s"}, {"r"}, {"f"})
        assert result.sampled.keys() == {"a"}
    finally:
        worker.shutdown()
    assert connector.calls[-1] == "shutdown"


def test_a_connector_that_works_by_layer_is_told_of_every_layer(folder: Path) -> None:
    connector = LayerwiseConnector()
    worker = with_connector(folder, connector)
    try:
        worker.execute(SchedulerOutput(step=0, sequences=[Driven("a", [1]).take(1, [0])]))
    finally:
        worker.shutdown()
    by_layer = [call for i in range(3) for call in (f"wait layers.{i}", f"save layers.{i}")]
    assert connector.calls == [*by_layer, "wait for save", "finished", "shutdown"]


def test_threads_are_set(folder: Path) -> None:
    before = torch.get_num_threads()
    worker = make_worker(folder, threads=1)
    try:
        assert torch.get_num_threads() == worker.threads == 1
    finally:
        worker.shutdown()
        torch.set_num_threads(before)


@pytest.mark.parametrize("prepare", [False, True])
def test_images_are_prepared_at_start_up_only_where_configured(folder: Path, prepare: bool) -> None:
    sleep = SleepConfig(enable_sleep_mode=True, prepare_images=prepare)
    config = EngineConfig(model=ModelConfig(source=str(folder), threads=1), sleep=sleep, **cache(num_blocks=8))
    worker = Worker(config, resolve_model(config.model))
    try:
        worker.load()
        worker.initialize_kv_cache(worker.determine_num_blocks())
        worker.prepare_images()
        before = {t.tag: t.image_bytes for t in worker.memory.stats().tags}
        worker.memory.sleep()
        after = {t.tag: t.image_bytes for t in worker.memory.stats().tags}
        assert before == (after if prepare else dict.fromkeys(after, 0))
        assert (after["weights"] > 0, after["kv_cache"]) == (True, 0)
    finally:
        worker.shutdown()


def sharing_worker(folder: Path) -> Worker:
    config = EngineConfig(
        model=ModelConfig(source=str(folder), threads=1),
        memory=MemoryConfig(driver="host", share_images=True, chunk_bytes=64 << 10),
        sleep=SleepConfig(enable_sleep_mode=True),
        **cache(num_blocks=8),
    )
    made = Worker(config, resolve_model(config.model))
    made.load()
    return made


def test_workers_of_the_same_model_share_the_weights_image(tmp_path: Path) -> None:
    save_tiny(tmp_path, seed=os.getpid() + 1)
    first, second = sharing_worker(tmp_path), sharing_worker(tmp_path)
    try:
        shared = second.memory.stats().tag("weights").shared_image_bytes
        assert shared == second.memory.stats().host_committed_bytes > 0
        assert "0 of them found" in first.facts["weights' image"]
        assert f"{shared / 2**20:.0f} MiB shared, {shared / 2**20:.0f} of them found" in second.facts["weights' image"]
        for made in (first, second):
            assert made.memory.sleep({"weights": "host"}).tags[0].copied_bytes == 0
            made.memory.wake()
        second.memory.sleep({"weights": "discard"})
        assert second.memory.stats().host_committed_bytes == 0
        second.memory.wake()
        second.reload_weights()
        assert second.memory.stats().tag("weights").shared_image_bytes == shared, "level 2 shares again"
    finally:
        first.shutdown()
        second.shutdown()


def test_a_worker_that_cannot_share_goes_on_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing, "find_files", lambda keys: (_ for _ in ()).throw(OSError("no /proc")))
    made = sharing_worker(folder)
    try:
        assert "no /proc" in made.facts["weights' image"]
        assert "no /proc" in caplog.text
        assert made.memory.sleep({"weights": "host"}).tags[0].copied_bytes > 0
        made.memory.wake()
    finally:
        made.shutdown()


def test_sharing_images_without_sleep_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="enable_sleep_mode"):
        EngineConfig(model=ModelConfig(source=str(folder)), memory=MemoryConfig(share_images=True))


def test_weights_that_lack_something_are_refused_by_the_worker(loaded: Worker, tmp_path: Path) -> None:
    """Before the executor gives the present ones up: whole headers and the right configuration do not make a checkpoint."""
    save_tiny(tmp_path, seed=2)
    loaded.prepare_update(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        loaded.prepare_update(str(tmp_path))
