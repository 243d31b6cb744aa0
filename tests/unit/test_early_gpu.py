"""A GPU that is made ready beside the imports: start-up waits for it, and is not stopped by one that does not work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from torpor.engine import early_gpu
from torpor.engine.early_gpu import EarlyGpu
from torpor.errors import DeviceError
from torpor.memory import MemoryConfig


class Opened:
    """Stands in for a Device whose opening takes as long as ``opens`` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, opens: Callable[[], None]) -> None:
        self.events: list[str] = []

        def open_device(driver: str, ordinal: int) -> Opened:
            self.events.append(f"open {driver} {ordinal}")
            opens()
            return self

        monkeypatch.setattr(early_gpu.Device, "open", open_device)
        monkeypatch.setattr(early_gpu, "_prepare_torch", lambda ordinal: self.events.append(f"torch {ordinal}"))

    def close(self) -> None:
        self.events.append("close")


def test_torch_gets_its_context_while_the_device_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    go, began = threading.Event(), threading.Event()

    def slowly() -> None:
        began.set()
        assert go.wait(10)

    opened = Opened(monkeypatch, slowly)
    gpu = EarlyGpu(MemoryConfig(driver="cuda", device=2))
    assert began.wait(10), "it begins when it is made"
    assert opened.events == ["open cuda 2"]
    threading.Timer(0.2, go.set).start()
    gpu.wait()
    assert opened.events == ["open cuda 2", "torch 2", "close"]
    gpu.wait()


def test_a_host_engine_touches_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch, lambda: None)
    EarlyGpu(MemoryConfig(driver="host")).wait()
    assert opened.events == []


@pytest.mark.parametrize("error", [DeviceError("no such device", operation="open"), RuntimeError("?")])
def test_a_gpu_that_does_not_work_is_for_others_to_find(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails() -> Any:
        raise error

    opened = Opened(monkeypatch, fails)
    EarlyGpu(MemoryConfig(driver="auto")).wait()
    assert opened.events == ["open cuda 0"]
