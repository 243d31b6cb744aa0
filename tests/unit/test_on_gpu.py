"""scripts/gpu without a GPU: a part that fails or hangs is a line of its own, and leaves nothing behind."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "on_gpu"
MODULES = ("parts", "place", "report")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of its main module, and those of the modules beside it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    main = runpy.run_path(str(SCRIPTS / "__main__.py"), run_name="on_gpu")
    names = {name: sys.modules.pop(name) for name in MODULES}
    return {**main, **names}


def run(on_gpu: dict[str, Any], folder: Path, code: str, limit_s: float = 20.0, benchmark: str = "", minutes: float = 1.0) -> Any:
    place = on_gpu["place"].Place(sys.executable, {"PATH": "/usr/bin"})
    part = on_gpu["parts"].Part("tried", ("-c", code), limit_s, benchmark)
    return on_gpu["run"](part, place, folder, folder, time.monotonic() + 60 * minutes)


def test_what_a_part_says_last_is_what_it_says(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    result = run(on_gpu, tmp_path, "print('=== 3 passed ===')")
    assert (result.failure, result.says) == ("", "3 passed")
    assert (tmp_path / "tried.log").read_text() == "=== 3 passed ===\n"


def test_a_part_that_fails_has_its_status_in_its_line(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    assert run(on_gpu, tmp_path, "raise SystemExit(3)").failure == "exit status 3"
    assert run(on_gpu, tmp_path, "", benchmark="gpu_nothing").failure == "wrote no figures"


def test_a_part_that_hangs_is_stopped_with_what_it_started(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    began = time.monotonic()
    assert run(on_gpu, tmp_path, child, limit_s=1.0).failure == "stopped after 1 s"
    assert time.monotonic() - began < 15
    stat = Path("/proc", (tmp_path / "tried.log").read_text().strip(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_no_part_is_begun_when_the_time_is_up(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    assert "no time" in run(on_gpu, tmp_path, "print('ran')", minutes=0.0).failure
    assert not (tmp_path / "tried.log").exists()


def test_goals_come_from_the_figures_of_this_run(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    goals = [{"what": "wake", "measured": "0.5 s", "needed": "0.4 s", "reached": False}]
    figures = {
        "gpu_sleep": {"when": "2999-01-01T00:00:00+00:00", "goals": goals},
        "gpu_old": {"when": "2020-01-01T00:00:00+00:00"},
    }
    (tmp_path / "h200.json").write_text(json.dumps(figures))
    result = run(on_gpu, tmp_path, "", benchmark="gpu_sleep")
    assert (result.failure, result.missed, result.says) == ("", 1, "0 of 1 goals reached")
    assert run(on_gpu, tmp_path, "", benchmark="gpu_old").failure == "wrote no figures"


def test_every_benchmark_of_a_gpu_is_a_part_and_only_chooses_by_name(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    parts = on_gpu["parts"].all_parts(tmp_path, "random", quick=True, slow=False)
    benchmarks = {path.stem.removeprefix("gpu_") for path in (SCRIPTS.parents[1] / "benchmarks").glob("gpu_*.py")}
    assert {part.name for part in parts} == benchmarks | {"tests", "demo", "unfollowed"}
    assert [part.name for part in on_gpu["parts"].chosen(parts, "demo, tests")] == ["tests", "demo"]
    asked_for = {part.name for part in parts} - {part.name for part in on_gpu["parts"].chosen(parts, "")}
    assert asked_for == on_gpu["parts"].ON_REQUEST & benchmarks
    with pytest.raises(SystemExit, match="sleeep"):
        on_gpu["parts"].chosen(parts, "sleeep")


def test_without_a_model_the_demo_takes_a_random_one(on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    asked = on_gpu["options"]()
    assert on_gpu["place"].model_for_demo(asked.model, system_python=False) == "builtin:smollm2-135m"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert on_gpu["place"].model_for_demo(asked.model, system_python=True) == "random"


def test_a_model_in_pieces_is_joined(on_gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu["place"], "ROOT", tmp_path)
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    for number, text in enumerate(("one ", "two")):
        (pieces / f"small.gguf.part{number}").write_text(text)
    joined = Path(on_gpu["place"].whole_model(str(pieces)))
    assert (joined.name, joined.read_text()) == ("small.gguf", "one two")
    assert on_gpu["place"].whole_model("random") == "random"
