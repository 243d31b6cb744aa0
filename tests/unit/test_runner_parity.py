"""The runner's greedy tokens are transformers' own, through chunked prefill, mixed batches and scattered blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import Driven, drive, make_worker, prompts, reference_greedy, save_tiny


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gemma2", "mixtral"])
def test_greedy_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    """The window of gemma2 and gemma3 (8) is shorter than most prompts; gemma2 caps its scores; mixtral's weights are merged."""
    model = save_tiny(tmp_path, family)
    sequences = [Driven(str(i), prompt) for i, prompt in enumerate(prompts(3, 21, 30, 9))]
    worker = make_worker(tmp_path)
    try:
        drive(worker, sequences, 16)
    finally:
        worker.shutdown()
    expected = [reference_greedy(model, s.prompt, 16) for s in sequences]
    assert [s.output for s in sequences] == expected
    assert len({token for output in expected for token in output}) > 4, "a model that repeats one token proves nothing"


_LONG = {"original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **_LONG},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_LONG},
    "longrope": {"factor": 4.0, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8, **_LONG},
}


@pytest.mark.parametrize("fused", ["on", "off"])
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embeddings_of_every_type(tmp_path: Path, rope: str, fused: str) -> None:
    """longrope keeps a tensor beside its buffers, which the probe on the meta device once left there without content."""
    model = save_tiny(tmp_path, "llama", rope_parameters={"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]})
    sequences = [Driven(str(i), prompt) for i, prompt in enumerate(prompts(3, 21, 40))]
    worker = make_worker(tmp_path, fused_layers=fused)
    try:
        drive(worker, sequences, 8)
    finally:
        worker.shutdown()
    assert [s.output for s in sequences] == [reference_greedy(model, s.prompt, 8) for s in sequences]


@pytest.mark.parametrize(("chunk", "budget"), [(1, 8), (4, 8), (32, 32)])
def test_chunk_size_does_not_matter(tmp_path: Path, chunk: int, budget: int) -> None:
    model = save_tiny(tmp_path, "gemma3")
    sequences = [Driven(str(i), prompt) for i, prompt in enumerate(prompts(25, 14))]
    worker = make_worker(tmp_path)
    try:
        drive(worker, sequences, 8, chunk=chunk, budget=budget, seed=chunk)
    finally:
        worker.shutdown()
    assert [s.output for s in sequences] == [reference_greedy(model, s.prompt, 8) for s in sequences]


def test_a_cached_prefix_gives_the_same_tokens(tmp_path: Path) -> None:
    """A second sequence that starts behind blocks the first one wrote, as after a prefix-cache hit or a transfer."""
    model = save_tiny(tmp_path)
    [prompt] = prompts(18)
    worker = make_worker(tmp_path)
    try:
        first = Driven("first", prompt)
        drive(worker, [first], 1)
        second = Driven("second", prompt, done=16, blocks=first.blocks[:4])
        drive(worker, [second], 8)
    finally:
        worker.shutdown()
    assert second.output == reference_greedy(model, prompt, 8)
