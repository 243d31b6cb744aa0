"""Fused layers compute what transformers' layers compute, over the same parameters, and add no tensor of their own (E1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import Driven, drive, make_worker, prompts, reference_greedy, save_tiny

from torpor.engine.worker import Worker
from torpor.errors import ConfigurationError
from torpor.memory import Memory, MemoryConfig
from torpor.models import ModelConfig, load_model, resolve_model
from torpor.models.attention import StepContext
from torpor.models.fused import ops

PROMPTS = prompts(9, 5, 14)


@pytest.fixture
def started() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(folder: Path, **settings: Any) -> Worker:
        workers.append(make_worker(folder, **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.shutdown()


def answers(worker: Worker) -> list[list[int]]:
    sequences = [Driven(str(index), prompt) for index, prompt in enumerate(PROMPTS)]
    drive(worker, sequences, 8)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("special", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_answers_are_those_of_transformers(
    tmp_path: Path, started: Callable[..., Worker], family: str, special: dict[str, Any]
) -> None:
    model = save_tiny(tmp_path, family, **special)
    worker = started(tmp_path, fused_layers="on")
    assert worker.model.fused is not None
    assert answers(worker) == [reference_greedy(model, prompt, 8) for prompt in PROMPTS]


def test_e1_merged_parameters_lie_together_in_the_pool_and_nowhere_else(tmp_path: Path, started: Callable[..., Worker]) -> None:
    save_tiny(tmp_path, "qwen3")
    worker = started(tmp_path, fused_layers="on")
    fused, pool = worker.model.fused, worker.memory.pool("weights")
    assert fused is not None
    assert pool.stats().regions == 1
    for layer, own in zip(worker.model.module.model.layers, fused._layers, strict=True):
        attention = layer.self_attn
        assert own.qkv.weight.data_ptr() == attention.q_proj.weight.data_ptr()
        whole = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        assert torch.equal(own.qkv.weight, whole)
        assert pool.owns(own.qkv.weight)
        assert own.gate_up.weight.data_ptr() == layer.mlp.gate_proj.weight.data_ptr()
        assert torch.equal(own.gate_up.weight, torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]))


def test_e2_weights_that_are_read_again_are_the_fused_layers_too(tmp_path: Path, started: Callable[..., Worker]) -> None:
    save_tiny(tmp_path, "qwen2")
    worker = started(tmp_path, fused_layers="on")
    before = answers(worker)
    worker.memory.sleep({"weights": "discard", "runtime": "discard", "kv_cache": "discard"})
    worker.memory.wake()
    worker.reload_weights()
    worker.reset_runtime()
    worker.memory.mark_valid("kv_cache")
    assert answers(worker) == before


def test_one_layer_of_each_kind_runs_all_kernels(tmp_path: Path, started: Callable[..., Worker]) -> None:
    """What is compiled before a capture: the first norm is alone in the first layer only, and a window is another plan."""
    save_tiny(tmp_path, "qwen3", num_hidden_layers=4, sliding_window=8, use_sliding_window=True, max_window_layers=2)
    fused = started(tmp_path, fused_layers="on").model.fused
    assert fused is not None
    assert [layer.attention.sliding_window for layer in fused._layers] == [None, None, 8, 8]
    assert fused.kinds == (0, 1, 2)


def test_keys_are_not_stored_before_a_connector_has_loaded_the_layer() -> None:
    step = SimpleNamespace(stored_elsewhere=True)
    batch: Any = None
    assert StepContext(batch=batch, step=step, kv_caches=()).stored_elsewhere  # type: ignore[arg-type]
    assert not StepContext(batch=batch, step=step, kv_caches=(), events=object()).stored_elsewhere  # type: ignore[arg-type]


def test_other_layers_stay_as_transformers_computes_them(tmp_path: Path, started: Callable[..., Worker]) -> None:
    model = save_tiny(tmp_path, "gemma3")
    worker = started(tmp_path, fused_layers="on")
    assert worker.model.fused is None
    assert answers(worker) == [reference_greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize(("setting", "value"), [("fused_layers", "maybe"), ("deterministic", True)])
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, setting: str, value: Any) -> None:
    save_tiny(tmp_path)

    def load(memory: Memory) -> None:
        config = ModelConfig(source=str(tmp_path), **{setting: value})
        load_model(resolve_model(config), config, memory)

    with Memory(MemoryConfig(driver="host")) as memory, pytest.raises(ConfigurationError, match=setting):
        load(memory)


def test_on_a_host_layers_are_not_fused_unless_asked(tmp_path: Path, started: Callable[..., Worker]) -> None:
    save_tiny(tmp_path)
    assert started(tmp_path).model.fused is None


def test_a_norm_is_of_the_sum_and_the_residual_keeps_it() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    normed = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (8,), weight, 1e-6))
