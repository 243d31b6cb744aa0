"""The runner that replays graphs, with calls in the place of graphs: which steps it replays, at what size, and what padding does.

On a GPU the same is tested with real graphs (``tests/gpu/test_gpu_engine.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import Driven, drive, make_worker, prompts, reference_greedy, run_step, save_tiny

from torpor.engine import graphs
from torpor.engine.graphs import GraphRunner, graph_obstacle
from torpor.engine.worker import Worker
from torpor.memory import Pool
from torpor.models.attention import AttentionStep, PagedBatch
from torpor.models.attention.base import write_kv
from torpor.models.attention.sdpa import SdpaBackend


class Call:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._run()


class Calls:
    """Stands in for GraphMemory."""

    def __init__(self, pool: Pool) -> None: ...

    def capture(self, run: Callable[[], None], prepare: Callable[[], None]) -> Call:
        prepare()
        return Call(run)


class CapturableSdpa(SdpaBackend):
    """As a backend that can be captured, it passes over rows without a slot and reads lengths from the tensor alone."""

    graphs = True
    clears_blocks = False

    def begin(self, batch: PagedBatch, dtype: torch.dtype) -> AttentionStep:
        lens = tuple(max(1, length) for length in batch.seq_lens_tensor.tolist())  # the tuple is the capture's
        step = super().begin(dataclasses.replace(batch, seq_lens=lens), dtype)

        def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
            rows = (batch.slots >= 0).nonzero()[:, 0]
            write_kv(kv_cache, key[rows], value[rows], dataclasses.replace(batch, slots=batch.slots[rows]))

        step.write_kv = write  # type: ignore[method-assign]
        return step


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Its runner is replaced by one that replays."""
    monkeypatch.setattr(graphs, "GraphMemory", Calls)
    save_tiny(tmp_path, "qwen3")
    made = make_worker(tmp_path, fused_layers="on")
    made.model.backend = CapturableSdpa()
    eager = made._runner
    assert eager is not None
    for cache in eager.kv_caches:  # what lies beyond a context is read and masked: as nobody wrote it, it must be finite
        cache.zero_()
    made._runner = GraphRunner(made.model, made.kv_caches, made.kv_spec, eager.inputs, made.memory)
    made.warm_up()
    yield made
    made.shutdown()


def runner_of(worker: Worker) -> GraphRunner:
    assert isinstance(worker._runner, GraphRunner)
    return worker._runner


def replays(worker: Worker) -> dict[int, int]:
    found: dict[int, Any] = dict(runner_of(worker)._graphs)
    return {bucket: graph.replays for bucket, graph in found.items() if graph.replays}


def test_capturing_writes_to_no_block(worker: Worker) -> None:
    assert runner_of(worker).captures == len(runner_of(worker).buckets)
    assert all(not cache.any() for cache in worker.kv_caches.values())


def test_answers_are_those_of_transformers_at_every_size(worker: Worker, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "again", "qwen3")
    many = prompts(9, 5, 14, 3, 1, 8)
    sequences = [Driven(str(index), prompt) for index, prompt in enumerate(many)]
    drive(worker, sequences, 10)
    assert [s.output for s in sequences] == [reference_greedy(model, prompt, 10) for prompt in many]
    assert replays(worker).keys() == {1, 2, 4, 8}


def test_only_steps_of_single_tokens_are_replayed(worker: Worker) -> None:
    sequence, other = Driven("a", prompts(9)[0]), Driven("b", prompts(5)[0])
    free = list(range(20))
    first = run_step(worker, [sequence.take(9, free)]).sampled
    assert replays(worker) == {}
    sequence.tokens.append(first["a"])
    run_step(worker, [sequence.take(1, free), other.take(5, free)])
    assert replays(worker) == {}
    sequence.tokens.append(0)
    run_step(worker, [sequence.take(1, free)])
    assert replays(worker) == {1: 1}


def test_a_sequence_that_does_not_sample_gets_no_token(worker: Worker) -> None:
    """A prompt's chunk may be one token long, beside decodes."""
    shares = [Driven(name, prompts(4)[0]).take(1, [block]) for name, block in (("a", 3), ("b", 4), ("c", 5))]
    shares[1] = dataclasses.replace(shares[1], samples=True)
    assert run_step(worker, shares).sampled.keys() == {"b"}
    assert run_step(worker, [dataclasses.replace(s, samples=False) for s in shares]).sampled == {}
    assert replays(worker) == {4: 2}


def test_a_connector_that_follows_layer_by_layer_is_followed_eagerly(worker: Worker) -> None:
    class Events:
        saved: ClassVar[list[str]] = []

        def wait_for_layer_load(self, layer_name: str) -> None: ...

        def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:
            self.saved.append(layer_name)

    runner_of(worker).events = Events()
    run_step(worker, [Driven("a", [5]).take(1, [0])])
    assert Events.saved == list(worker.model.layer_names)
    assert replays(worker) == {}


def test_e1_what_graphs_write_lies_in_their_pool(worker: Worker) -> None:
    tensors = runner_of(worker).tensors
    assert tensors.keys() == {"runtime", "cuda_graph"}
    for tag, own in tensors.items():
        assert {worker.memory.tag_of(tensor) for tensor in own} == {tag}


def test_why_a_model_is_not_captured(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    model = worker.model
    assert graph_obstacle(model) == "there are no CUDA graphs on cpu"
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert graph_obstacle(model) is None
    model.resolved.hf_config.rope_parameters = {"rope_type": "dynamic"}
    assert "dynamic" in str(graph_obstacle(model))
    model.fused = None
    assert "fused" in str(graph_obstacle(model))
    model.backend = SdpaBackend()
    assert "sdpa" in str(graph_obstacle(model))
