"""Safetensors: reads land in place, identity follows content, and damage is named, never a crash (issue: corrupt files)."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torpor.errors import ModelError
from torpor.models.checkpoint import Checkpoint, open_checkpoint
from torpor.models.checkpoint_files import INDEX_NAME


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(7, 5, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    targets = {name: torch.full(e.shape, 1, dtype=e.dtype) for name, e in checkpoint.entries.items()}
    checkpoint.read_into(targets)
    return targets


def test_reads_land_in_the_given_memory(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    expected = tensors()
    targets = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in targets.items()}
    checkpoint.read_into(targets)
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == addresses
    assert all(torch.equal(targets[name], expected[name]) for name in expected)
    assert checkpoint.dtype == torch.float32


def test_reads_convert_the_dtype_and_strided_targets(folder: Path) -> None:
    target = torch.zeros(5, 7, dtype=torch.bfloat16).t()
    open_checkpoint(folder).read_into({"matrix": target})
    assert torch.equal(target, tensors()["matrix"].bfloat16())


def test_shards(tmp_path: Path) -> None:
    names = list(tensors())
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: tensors()[name] for name in part}, tmp_path / f"m-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"m-{number}.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) == 2
    assert all(torch.equal(t, tensors()[name]) for name, t in read_all(checkpoint).items())
    (tmp_path / "m-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"m-1.safetensors: missing"):
        open_checkpoint(tmp_path)


def test_an_index_must_stay_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match="not in its own folder"):
        open_checkpoint(tmp_path)


def test_identity_changes_with_any_bit(folder: Path) -> None:
    file = folder / "model.safetensors"
    before = open_checkpoint(folder).digest()
    assert open_checkpoint(folder).digest() == before
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert open_checkpoint(folder).digest() != before


def test_every_truncation_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for size in range(len(data)):
        file.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            open_checkpoint(folder)
    file.write_bytes(data + b"x")
    with pytest.raises(ModelError, match="longer than its header says"):
        open_checkpoint(folder)


def test_every_damaged_header_byte_is_refused_or_harmless(folder: Path) -> None:
    """Whatever a flipped byte does to the header, the result is a ModelError or a consistent set of entries."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    for position in range(8 + length):
        for value in (0, 0xFF, data[position] ^ 1):
            file.write_bytes(data[:position] + bytes([value]) + data[position + 1 :])
            with contextlib.suppress(ModelError):
                checkpoint = open_checkpoint(folder)
                assert sum(e.nbytes for e in checkpoint.entries.values()) == len(data) - 8 - length


def test_a_file_cut_after_it_was_opened(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ModelError, match="ends at byte"):
        read_all(checkpoint)


def test_the_wrong_shape_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"shape \[7, 5\] where \[5, 7\]"):
        open_checkpoint(folder).read_into({"matrix": torch.zeros(5, 7)})


def test_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"it has pytorch_model.bin. Weights are read from safetensors only"):
        open_checkpoint(tmp_path)
