"""Damaged model files: an error that names the file, or a model that loads; never a crash, hang, memory bomb or half a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile_files
import hostile_kit
import pytest
from engine_models import save_model
from test_models_gguf import write_gguf
from tiny_models import save_tiny

pytestmark = pytest.mark.timeout(3600 if hostile_kit.SCALE > 1 else 300)
MAX_CASE_MIB = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the files there can be, all of them good."""
    folder = save_model(tmp_path_factory.mktemp("files") / "good")
    header = (folder / "model.safetensors").read_bytes()
    names = [n for n in json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]) if n != "__metadata__"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / hostile_files.FILES["index"]).write_text(json.dumps(index))
    (folder / hostile_files.FILES["generation"]).write_text('{"eos_token_id": [2, 3]}')
    small = save_tiny(folder.parent / "qwen", "qwen2", num_hidden_layers=1, hidden_size=16, intermediate_size=32)
    write_gguf(folder / hostile_files.FILES["gguf"], small)
    return folder


@pytest.fixture(scope="module")
def outcomes(model: Path) -> list[dict[str, Any]]:
    hostile_kit.rng("files")
    share = 1.0 if hostile_kit.SCALE > 1 else 0.4  # of the cases that are always the same
    arguments = [str(hostile_kit.SEED), str(hostile_kit.SCALE), str(share), str(model), *hostile_files.COUNTS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    child = subprocess.run(
        [sys.executable, hostile_files.__file__, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=3000,
        check=False,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert child.returncode == 0, f"{lines[-1:]}: the process ended with {child.returncode}\n{child.stderr[-2000:]}"
    return [line for line in lines if "result" in line]


@pytest.mark.parametrize("kind", hostile_files.COUNTS)
def test_damage_is_an_error_that_names_the_file(kind: str, model: Path, outcomes: list[dict[str, Any]]) -> None:
    found = [case for case in outcomes if case["kind"] == kind]
    assert found
    for case in found:
        check(case, hostile_files.case_folder(model, kind))
        hostile_kit.tried(f"damaged files, {kind}: {'loaded all the same' if case['result'] == 'loaded' else 'refused'}")


def check(case: dict[str, Any], folder: Path) -> None:
    assert case["result"] in ("loaded", "ModelError", "ConfigurationError"), (
        f"{case['case']}: {case['text']}\n{case.get('trace')}"
    )
    if case["result"] == "ModelError":
        assert str(folder) in case["text"], case
    elif case["result"] == "ConfigurationError":
        assert "max_model_len" in case["text"], case
    assert case["mib"] < MAX_CASE_MIB, case
    assert not case["left"], case
