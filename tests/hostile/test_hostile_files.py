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
COUNTS = {"safetensors": 25, "index": 5, "config": 15, "generation": 5, "tokenizer": 8, "gguf": 12}


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


@pytest.mark.parametrize("kind", hostile_files.KINDS)
def test_damage_is_an_error_that_names_the_file(kind: str, model: Path) -> None:
    hostile_kit.rng(f"files {kind}")
    share = 1.0 if hostile_kit.SCALE > 1 else 0.4
    command = [
        sys.executable,
        hostile_files.__file__,
        kind,
        str(hostile_kit.SEED),
        str(hostile_kit.scaled(COUNTS[kind])),
        str(model),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [*command, str(share)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        out, err = child.communicate(timeout=3000)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert child.returncode == 0, f"{lines[-1:]}: the process ended with {child.returncode}\n{err[-2000:]}"
    found = [line for line in lines if "result" in line]
    assert found
    for case in found:
        check(kind, case, model.parent / f"case-{kind}")
        hostile_kit.tried(f"damaged files, {kind}: {'loaded all the same' if case['result'] == 'loaded' else 'refused'}")


def check(kind: str, case: dict[str, Any], folder: Path) -> None:
    assert case["result"] in ("loaded", "ModelError", "ConfigurationError"), (
        f"{case['case']}: {case['text']}\n{case.get('trace')}"
    )
    if case["result"] == "ModelError":
        assert str(folder) in case["text"], case
    elif case["result"] == "ConfigurationError":
        assert "max_model_len" in case["text"], case
    assert case["mib"] < MAX_CASE_MIB, case
    assert not case["left"], case
