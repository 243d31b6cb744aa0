from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import fault_points
import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Leak checks collect garbage often: torch's own objects are left out of that."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def blind_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not fault_points.tried:
        return
    what = "all" if fault_points.FULL else f"a share, seed {fault_points.SEED}"
    terminalreporter.section(f"fault points that struck ({what})")
    for table, count in sorted(fault_points.tried.items()):
        terminalreporter.write_line(f"{count:6d}  {table}")
    terminalreporter.write_line(f"{sum(fault_points.tried.values()):6d}  in all")
