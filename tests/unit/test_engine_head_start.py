"""What a start does beside the check of the model's files, and what is left of it when the start fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine_models import save_model, tiny_engine
from tiny_models import make_worker, save_tiny

from torpor.connectors.config import ConnectorConfig
from torpor.engine import startup
from torpor.engine.head_start import HeadStart, expected_bytes
from torpor.engine.startup import start_core
from torpor.errors import ConfigurationError, DeviceError, HostMemoryError, ModelError
from torpor.memory import Memory, MemoryConfig
from torpor.testing.driver import nothing_leaks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


class Opened(list[Memory]):
    """Every memory that was opened, and what was taken ahead in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.taken: list[int] = []
        init, take = Memory.__init__, Memory.take_ahead

        def note(memory: Memory, *arguments: Any, **more: Any) -> None:
            init(memory, *arguments, **more)
            self.append(memory)

        def note_taken(memory: Memory, nbytes: int) -> None:
            self.taken.append(nbytes)
            take(memory, nbytes)

        monkeypatch.setattr(Memory, "__init__", note)
        monkeypatch.setattr(Memory, "take_ahead", note_taken)

    @property
    def all_closed(self) -> bool:
        return all(memory._shared.closed for memory in self)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with nothing_leaks():
        yield Opened(monkeypatch)


def test_the_engine_gets_the_memory_that_was_opened_ahead(folder: Path, opened: Opened) -> None:
    core = start_core(tiny_engine(folder, driver="host", prepare_images=True))
    [memory] = opened
    stats = core.executor.memory_stats()
    assert opened.taken == [stats.tag("weights").allocated_bytes]
    assert stats.host_spare_bytes == 0
    assert stats.tag("weights").image_bytes > 0
    told = core.info.startup["images' host memory"]
    assert "beside the start" in told
    assert "waited for" in told
    assert "making images took" in core.info.startup
    core.shutdown()
    assert opened.all_closed
    assert memory is opened[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"prepare_images": False},
        {"prepare_images": None},  # by default not on the host
        {"prepare_images": True, "enable_sleep_mode": False, "driver": "cuda"},
        {"prepare_images": True, "share_images": True},
    ],
    ids=["not prepared", "by default", "no pools", "shared"],
)
def test_nothing_is_taken_where_no_image_is_prepared(folder: Path, settings: dict[str, Any], opened: Opened) -> None:
    config = tiny_engine(folder, **{"driver": "host"} | settings)
    if settings.get("enable_sleep_mode", True):
        with closing(HeadStart(config)) as head_start:
            assert head_start.memory() is None
    assert not opened.taken


def test_without_sleep_mode_prepared_images_are_none(folder: Path, opened: Opened) -> None:
    core = start_core(tiny_engine(folder, driver="host", enable_sleep_mode=False))
    assert not opened.taken
    core.shutdown()


@pytest.mark.parametrize(
    "error", [DeviceError("no"), ConfigurationError("no"), RuntimeError("a bug")], ids=["driver", "setting", "bug"]
)
def test_what_fails_is_the_starts_to_tell(folder: Path, error: Exception) -> None:
    def fails(config: MemoryConfig) -> Memory:
        raise error

    config = tiny_engine(folder, driver="host", prepare_images=True)
    with closing(HeadStart(config, fails)) as head_start:
        assert head_start.memory() is None


def test_without_host_memory_the_start_says_so(folder: Path, opened: Opened) -> None:
    """The device that was opened is used; what was not taken ahead is asked for again, by who needs it."""
    with pytest.raises(HostMemoryError, match="host_limit_bytes"):
        start_core(tiny_engine(folder, driver="host", prepare_images=True, host_limit_bytes=4096))
    assert len(opened) == 1
    assert opened.all_closed


@pytest.mark.parametrize("phase", ["model", "weights", "KV cache", "warm-up", "images"])
def test_a_start_that_fails_gives_all_back(
    folder: Path, tmp_path: Path, opened: Opened, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"driver": "host", "prepare_images": True}
    if phase == "model":
        save_tiny(tmp_path)
        (tmp_path / "config.json").write_text("{")
        folder = tmp_path
    elif phase == "KV cache":
        settings["kv_cache_bytes"], settings["num_blocks"] = 1, None
    else:
        where, name = {
            "weights": (Memory, "pool"),
            "warm-up": (startup.UniprocExecutor, "warm_up"),
            "images": (Memory, "prepare_images"),
        }[phase]
        monkeypatch.setattr(where, name, interrupted)
    with pytest.raises((KeyboardInterrupt, ModelError, ConfigurationError)):
        start_core(tiny_engine(folder, **settings))
    assert len(opened.taken) == len(opened) == 1
    assert opened.all_closed


def test_a_connector_that_is_refused_is_so_before_anything_is_opened(folder: Path, opened: Opened) -> None:
    connector = ConnectorConfig(connector="ipc", extra={"nope": 1})
    with pytest.raises(ConfigurationError, match="nope"):
        start_core(tiny_engine(folder, driver="host", prepare_images=True, connector=connector))
    assert len(opened) == 0


def interrupted(*arguments: Any, **more: Any) -> None:
    raise KeyboardInterrupt


def test_closing_waits_for_what_is_being_opened(folder: Path) -> None:
    gate, found = threading.Event(), []

    def slow(config: MemoryConfig) -> Memory:
        assert gate.wait(10)
        found.append(Memory(config))
        return found[0]

    head_start = HeadStart(tiny_engine(folder, driver="host", prepare_images=True), slow)
    threading.Timer(0.1, gate.set).start()
    head_start.close()
    head_start.close()
    assert found[0]._shared.closed


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_expected_is_what_the_weights_take(tmp_path: Path, family: str, dtype: str) -> None:
    save_tiny(tmp_path, family)
    worker = make_worker(tmp_path, dtype=dtype)
    try:
        taken = worker.memory.stats().tag("weights").allocated_bytes
        assert expected_bytes(tiny_engine(tmp_path, driver="host", dtype=dtype)) == taken
    finally:
        worker.shutdown()


def test_nothing_is_expected_of_what_is_no_folder_of_weights(folder: Path) -> None:
    assert expected_bytes(tiny_engine(folder, load_format="random")) == 0
    assert expected_bytes(tiny_engine(folder / "model.safetensors")) == 0
    assert expected_bytes(tiny_engine(Path("/nowhere"))) == 0


def test_damaged_files_are_the_starts_to_tell(tmp_path: Path, opened: Opened) -> None:
    """A header that promises more than the file has takes no host memory."""
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        start_core(tiny_engine(tmp_path, driver="host", prepare_images=True))
    assert not opened
