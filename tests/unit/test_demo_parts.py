"""The parts of the demo that need no engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.demo.pair import served_name
from torpor.demo.random_model import save_random_model
from torpor.demo.run import DemoConfig
from torpor.models import ModelConfig, resolve_model


def test_a_random_model_is_the_same_every_time(tmp_path: Path) -> None:
    """P and D may be started from two of them: peers compare the model's id."""
    one, two = (resolve_model(ModelConfig(source=str(save_random_model(tmp_path / name / "random")))) for name in "ab")
    assert one.model_id == two.model_id
    assert one.name == "random"


@pytest.mark.parametrize(
    ("source", "name"),
    [("builtin:smollm2-135m", "smollm2-135m"), ("/models/Qwen3-8B/", "Qwen3-8B"), ("here/tiny.Q4_1.gguf", "tiny.Q4_1")],
)
def test_a_model_is_asked_for_by_the_name_it_is_served_under(source: str, name: str) -> None:
    assert served_name(source) == name


@pytest.mark.parametrize(("driver", "gpus", "devices"), [("host", 2, (0, 0)), ("cuda", 1, (0, 0)), ("cuda", 2, (0, 1))])
def test_each_engine_takes_a_gpu_where_there_are_two(
    driver: str, gpus: int, devices: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert DemoConfig(memory_driver=driver).pair("ipc").devices == devices
