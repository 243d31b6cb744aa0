"""Steps of single tokens as CUDA graphs: captured once per batch size, replayed over the same addresses.

A step of up to ``bucket`` sequences replays the graph of that bucket, padded with rows that have no slot and no context. A sleep
takes memory away and a wake gives it back at the same addresses, so graphs stay valid and are never captured again.

Tag ``cuda_graph`` holds what graphs write and nobody else keeps: its content is worth nothing between steps, a sleep discards it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torpor.engine.executor import CUDA_GRAPH
from torpor.engine.graph_memory import GraphMemory
from torpor.engine.inputs import StepInputs
from torpor.engine.runner import Runner
from torpor.engine.sampler import Samples, likeliest, sample
from torpor.models.loader import LoadedModel
from torpor.scheduler.output import ScheduledSequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torpor.kvcache.types import KVCacheSpec
    from torpor.memory import Memory

_CHANGING_ROPES = frozenset({"dynamic", "longrope"})  # their frequencies depend on the longest position of the step


def graph_obstacle(model: LoadedModel) -> str | None:
    """Why steps of ``model`` cannot be captured; None if they can."""
    if model.device.type != "cuda":
        return f"there are no CUDA graphs on {model.device.type}"
    if not model.backend.graphs:
        return f"attention backend {model.backend.name} cannot be captured"
    if model.fused is None:
        return "the model's layers are not fused"
    ropes = getattr(model.resolved.hf_config, "rope_parameters", None) or {}
    if ropes.get("rope_type") in _CHANGING_ROPES:
        return f"rotary embeddings of type {ropes['rope_type']} change with the length"
    return None


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then in steps of 8 up to 64, of 16 up to 256, of 32 beyond; the last is ``max_num_seqs``."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 1, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class GraphRunner(Runner):
    """Replays graphs for steps of single tokens; runs all others, and those that a connector follows layer by layer, eagerly."""

    def __init__(
        self,
        model: LoadedModel,
        kv_caches: Mapping[str, torch.Tensor],
        spec: KVCacheSpec,
        inputs: StepInputs,
        memory: Memory,
    ) -> None:
        super().__init__(model, kv_caches, spec, inputs)
        self.buckets = bucket_sizes(inputs.max_seqs)
        self.captures = 0  # graphs captured since the start
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = memory.pool(CUDA_GRAPH, policy="discard")
        self._memory = GraphMemory(pool)
        self._logits = pool.empty((inputs.max_seqs, model.vocab_size), model.dtype)
        self._likeliest = pool.empty((inputs.max_seqs,), torch.int64)

    @property
    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {**super().tensors, CUDA_GRAPH: (self._logits, self._likeliest)}

    @torch.inference_mode()
    def capture_all(self, told: Callable[[float], None] = lambda fraction: None) -> None:
        """Capture every bucket, the largest first: the smaller ones find room in what it needed. Blocks; ``told`` gets the
        fraction that is done."""
        for done, bucket in enumerate(reversed(self.buckets)):
            told(done / len(self.buckets))
            self._capture(bucket)
        told(1.0)

    def _capture(self, bucket: int) -> None:
        step = self.inputs.padding(bucket, self.max_seq_len)
        logits, best = self._logits[:bucket], self._likeliest[:bucket]

        fused = self._model.fused
        assert fused is not None, "graph_obstacle"

        def run(layers: Sequence[int] | None = None) -> None:
            fused.forward(step.token_ids, step.positions, self.context(step), out=logits, layers=layers)
            best.copy_(likeliest(logits))

        # Nearly all of a capture is launching: one layer of each kind compiles what all of them need.
        self._graphs[bucket] = self._memory.capture(run, lambda: run(fused.kinds))
        self.captures += 1

    def _compute(self, sequences: Sequence[ScheduledSequence], sampling: Sequence[ScheduledSequence]) -> Samples:
        bucket = self._bucket(sequences)
        if bucket is None:
            return super()._compute(sequences, sampling)
        self.inputs.write_padded(sequences, bucket)
        self._graphs[bucket].replay()
        if not sampling:
            return self._unsampled()
        count = len(sequences)
        logits, best = self._logits[:count], self._likeliest[:count]
        if len(sampling) < count:
            rows = [index for index, s in enumerate(sequences) if s.samples]
            logits, best = logits[rows], best[rows]
        return sample(logits, sampling, best)

    def _bucket(self, sequences: Sequence[ScheduledSequence]) -> int | None:
        if self.events is not None or len(sequences[-1].token_ids) > 1:
            return None
        bucket = self.buckets[bisect_left(self.buckets, len(sequences))]
        return bucket if bucket in self._graphs else None
