"""An error that somebody has caught and forgotten keeps nothing: no ring of references through a traceback holds tensors, and
with them device memory, until the next garbage collection (M10)."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torpor.errors import ModelError
from torpor.memory.futures import result_of
from torpor.models.checkpoint import open_checkpoint


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Thing:
    pass


def fail(thing: Thing) -> None:
    raise ValueError("no")


def test_what_failed_on_a_thread_keeps_nothing() -> None:
    thing = Thing()
    kept = weakref.ref(thing)
    with ThreadPoolExecutor(1) as pool:
        jobs = deque([pool.submit(fail, thing)])
        del thing
        with pytest.raises(ValueError, match="no") as caught:
            result_of(jobs.popleft())
        del caught
    assert kept() is None


def test_what_went_well_is_given_back() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert result_of(pool.submit(lambda: 5)) == 5


def test_targets_of_a_read_that_failed_die_with_their_last_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000), "b": torch.zeros(1000)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(6000)
    targets = {name: torch.empty(1000) for name in "ab"}
    kept = [weakref.ref(target) for target in targets.values()]
    with pytest.raises(ModelError, match="ends at byte") as caught:
        checkpoint.read_into(targets)
    del targets, caught
    assert [one() for one in kept] == [None, None]
