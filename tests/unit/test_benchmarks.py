"""Every benchmark that needs no process of its own runs once, short, and writes what it says it writes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_models import save_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def results_of(folder: Path, name: str) -> dict[str, Any]:
    """From the one file that was written, which says on what and with what it was measured."""
    [path] = folder.glob("host-*.json")
    written = json.loads(path.read_text())[name]
    assert written["command"].startswith(f"python benchmarks/{name}.py")
    assert {"processor", "cores", "memory_gib", "kernel"} <= written["hardware"].keys()
    assert {"python", "torch", "commit"} <= written["versions"].keys()
    assert written["rows"]
    assert all({"what", "measured", "needed", "reached"} == goal.keys() for goal in written["goals"])
    return dict(written["results"])


def test_engine_throughput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model must give generate's own tokens, alone and in a padded batch."""
    model = save_model(tmp_path / "model")
    script = BENCHMARKS / "engine_throughput.py"
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(script), "--quick", "--model", str(model), "--out", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    results = results_of(tmp_path, "engine_throughput")
    assert results["batch_1"]["same_answers"] == 1
    assert results["batch_8"]["same_answers"] == 8
    assert results["arriving"]["times_as_fast"] > 0


def test_scheduler_steps_without_torch(tmp_path: Path) -> None:
    """The script itself refuses to report with torch or numpy in its process."""
    command = [sys.executable, str(BENCHMARKS / "scheduler_steps.py"), "--quick", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "140"})
    results = results_of(tmp_path, "scheduler_steps")
    assert results["full"]["sequences_per_step"] == 20
    assert results["full"]["waiting"] == 50
    assert results["busy"]["steps_per_s"]["median"] > 0


def test_connectors(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "connectors.py"), "--quick", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=100, stdout=subprocess.DEVNULL)
    results = results_of(tmp_path, "connectors")
    assert results["ipc"]["path"] == "shared memory of one host"
    for found in (one for one in results.values() if isinstance(one, dict)):
        assert found["release_s"]["median"] > 0
        assert found["restore_s"]["median"] > 0
        assert found["load_gb_per_s"]["median"] > 0
        assert found["load_over_ipc"]["median"] > 0
