"""What an engine takes when it is not told: the device, and what a step may hold there."""

from __future__ import annotations

from typing import Any

import pytest

from torpor.engine.config import EngineConfig
from torpor.engine.startup import on_this_machine
from torpor.errors import ConfigurationError
from torpor.kvcache.config import CacheConfig
from torpor.memory import Memory, MemoryConfig, choose_driver, drivers
from torpor.models.config import ModelConfig
from torpor.scheduler.config import SchedulerConfig


class Opened:
    def close(self) -> None: ...


def no_gpu(driver: str, ordinal: int) -> Any:
    raise ConfigurationError("there is no libcuda.so.1", setting="driver", value=driver)


def machine(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, torch_sees_it: bool = True) -> None:
    monkeypatch.setattr(drivers.Device, "open", staticmethod((lambda driver, ordinal: Opened()) if gpu else no_gpu))
    monkeypatch.setattr(drivers, "torch_sees_gpus", lambda: torch_sees_it)


def test_auto_is_the_gpu_where_torch_can_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=True)
    assert choose_driver("auto") == "cuda"
    assert choose_driver("host") == "host"


def test_auto_is_the_host_without_a_gpu_or_with_a_torch_for_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=False)
    assert choose_driver("auto") == "host"
    assert choose_driver("cuda") == "cuda", "what is asked for is not replaced: opening it says what is missing"
    machine(monkeypatch, gpu=True, torch_sees_it=False)
    assert choose_driver("auto") == "host"


def test_a_memory_says_which_driver_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "torch_sees_gpus", lambda: False)
    with Memory(MemoryConfig()) as memory:
        assert memory.config.driver == memory.device.driver == "host"


def test_a_driver_that_is_not_there_names_the_setting_that_asked_for_it() -> None:
    with pytest.raises(ConfigurationError, match=r"memory driver 'cuda': ") as caught:
        Memory(MemoryConfig(driver="cuda", device=4711))
    there = "device 4711" in str(caught.value)  # a machine with a driver misses only the device
    assert (caught.value.setting, caught.value.value) == (("device", 4711) if there else ("driver", "cuda"))
    with pytest.raises(ConfigurationError, match="only device 0") as caught:
        Memory(MemoryConfig(driver="host", device=3))
    assert (caught.value.setting, caught.value.value) == ("device", 3)


def config(**scheduler: int) -> EngineConfig:
    return EngineConfig(model=ModelConfig(source="x"), scheduler=SchedulerConfig(**scheduler))


def test_a_gpu_takes_larger_steps_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=True)
    chosen = on_this_machine(config())
    assert chosen.memory.driver == "cuda"
    assert (chosen.scheduler.seats, chosen.scheduler.token_budget) == (256, 8192)
    told = on_this_machine(config(max_num_seqs=3, max_num_batched_tokens=7)).scheduler
    assert (told.seats, told.token_budget) == (3, 7)


def test_a_host_takes_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=False)
    chosen = on_this_machine(config()).scheduler
    assert (chosen.seats, chosen.token_budget) == (64, 512)


@pytest.mark.parametrize("value", [0.0, -1.0, 1.5])
def test_a_part_of_the_gpu_is_a_part(value: float) -> None:
    with pytest.raises(ConfigurationError, match="gpu_memory_utilization"):
        CacheConfig(gpu_memory_utilization=value)
