"""Reading a checkpoint in steps: each tensor is announced before it is written and told when all of it has been."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torpor.errors import ModelError
from torpor.models import checkpoint
from torpor.models.checkpoint import open_checkpoint


class Journal:
    """Looks, when a tensor is told, whether it has all of its values."""

    def __init__(self, targets: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
        self._targets, self._values = targets, values
        self._lock = threading.Lock()
        self.before_calls: list[str] = []
        self.after_calls: list[tuple[str, bool]] = []

    def before(self, name: str) -> None:
        with self._lock:
            self.before_calls.append(name)

    def after(self, name: str) -> None:
        whole = torch.equal(self._targets[name], self._values[name].to(self._targets[name].dtype))
        with self._lock:
            self.after_calls.append((name, whole))


def test_a_tensor_is_told_once_when_all_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PART_BYTES", 1000)
    values = {f"t{i}": torch.randn(n) for i, n in enumerate((5000, 1, 249, 250, 251, 0))}
    save_file(values, tmp_path / "model.safetensors")
    targets = {name: torch.full_like(value, torch.nan) for name, value in values.items()}
    targets["t0"] = targets["t0"].to(torch.float64)  # converted on the way, in one piece
    targets["t3"] = torch.zeros(250, 2)[:, 0]  # not contiguous
    journal = Journal(targets, values)
    open_checkpoint(tmp_path).read_into(targets, journal)
    assert sorted(journal.after_calls) == [(name, True) for name in sorted(values)]
    assert set(journal.before_calls) == set(values)
    assert all(torch.equal(targets[name], values[name].to(targets[name].dtype)) for name in values)


def test_steps_that_raise_end_the_reading(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10), "b": torch.zeros(10)}, tmp_path / "model.safetensors")

    class Refusing:
        def before(self, name: str) -> None:
            raise ModelError("no memory")

        def after(self, name: str) -> None: ...

    with pytest.raises(ModelError, match="no memory"):
        open_checkpoint(tmp_path).read_into({"a": torch.empty(10), "b": torch.empty(10)}, Refusing())
