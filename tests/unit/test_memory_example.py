"""The example of ``torpor.memory`` runs and says what it does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "memory_pools.py"


def test_the_example_runs_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "the weights are the same, at the same address"
    assert any(line == "sleep optimizer host: 32 MiB returned, 2 copied" for line in lines)
