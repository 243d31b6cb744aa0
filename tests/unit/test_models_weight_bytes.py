"""How much memory weights will take, told by headers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import make_worker, save_tiny

from torpor.models import ModelConfig
from torpor.models.checkpoint import INDEX_NAME
from torpor.models.weight_bytes import expected_weight_bytes


def expected(folder: Path, **settings: str) -> int | None:
    return expected_weight_bytes(ModelConfig(source=str(folder), **settings))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_what_the_weights_take(tmp_path: Path, family: str, dtype: str) -> None:
    save_tiny(tmp_path, family)
    worker = make_worker(tmp_path, dtype=dtype)
    try:
        assert expected(tmp_path, dtype=dtype) == worker.memory.stats().tag("weights").allocated_bytes
    finally:
        worker.shutdown()


def test_files_that_an_index_names_are_added_up(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(64)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(64).bfloat16(), "n": torch.zeros(3, dtype=torch.int64)}, tmp_path / "two.safetensors")
    names = {"a": "one.safetensors", "b": "two.safetensors", "n": "two.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": names}))
    assert expected(tmp_path) == 256 + 256 + 256
    assert expected(tmp_path, dtype="float32") == 256 + 256 + 256
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../" + tmp_path.name + "/one.safetensors"}}))
    assert expected(tmp_path) is None


def test_what_cannot_be_told_is_nothing(tmp_path: Path) -> None:
    assert expected(tmp_path) is None
    assert expected(tmp_path / "nowhere") is None
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, file)
    assert expected(tmp_path, load_format="random") is None
    assert expected_weight_bytes(ModelConfig(source=str(file))) is None
    good = file.read_bytes()
    header = len(good) - 256 - 8
    for damaged in (
        good[:5],
        good[:-1],
        good + b"x",
        b"\xff" * 16,
        good.replace(b"F32", b"F99"),
        good.replace(b"[64]", b"[-4]"),
        good.replace(b"[64]", b'["]"'),
        good[:8] + b"[" * header + good[8 + header :],
    ):
        file.write_bytes(damaged)
        assert expected(tmp_path) is None, damaged[:80]
    file.unlink()
    os.mkfifo(file)  # opening it would block
    assert expected(tmp_path) is None


def test_nothing_heavy_is_imported_for_it() -> None:
    code = "import sys, torpor.engine.head_start; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
