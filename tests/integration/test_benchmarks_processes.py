"""The benchmarks that start servers run once, short, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_runs
import pytest
from engine_models import save_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]
BENCHMARKS = Path(engine_runs.__file__).parents[2] / "benchmarks"


def run_quick(tmp_path: Path, name: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--out", str(tmp_path)]
    command += options or ("--model", str(save_model(tmp_path / "model")))
    done = subprocess.run(command, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("host-*.json")
    return dict(json.loads(path.read_text())[name]["results"])


def test_startup(tmp_path: Path) -> None:
    results = run_quick(tmp_path, "startup")
    [first_token] = results["to_first_token_s"]["warm"]["values"]
    phases = results["phases_s"]["warm"]
    assert {"processes and imports", "loading weights", "allocating the KV cache", "loading the tokenizer"} <= phases.keys()
    assert sum(phases.values()) == pytest.approx(first_token, rel=0.01)
    assert results["alone_s"]["torpor --help"]["median"] > 0


def test_pd_first_token(tmp_path: Path) -> None:
    """The script itself refuses to report when a prompt whose KV there is was computed."""
    results = run_quick(tmp_path, "pd_first_token")
    for connector in ("ipc", "offload"):
        [length] = results[connector]["lengths"].values()
        assert length["single"]["median"] > 0
        assert length["connector"]["median"] > 0
        assert length["over_single"] > 0


def test_gpu_transfer_without_a_gpu(tmp_path: Path) -> None:
    """On the host driver: what arrives is what was sent, over every connector that is installed."""
    results = run_quick(tmp_path, "gpu_transfer", "--driver", "host", "--mib", "4", "--sizes", "16384")
    for sizes in results["host"].values():
        assert sizes["16384"]["identical"]
        assert sizes["16384"]["load"]["median"] > 0


def test_gpu_pair_without_a_gpu(tmp_path: Path) -> None:
    """As test_pd_first_token, which has the host's flags."""
    model = str(save_model(tmp_path / "model"))
    results = run_quick(tmp_path, "gpu_pair", "--driver", "host", "--model", model, "--dtype", "float32", "--threads", "1")
    [length] = results["first_token_s"].values()
    assert length["pair"]["median"] > 0
    assert results["tokens_per_s"]["pair"]["median"] > 0
