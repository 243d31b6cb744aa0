"""Running one step of the model: from the scheduler's output to sampled tokens.

The runner keeps no state of requests. What it keeps are the step's inputs - token ids, positions, slots, block tables, lengths
- in tensors of fixed size in pool ``runtime``, written anew by every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from torpor.engine.sampler import Samples, sample
from torpor.errors import BugError
from torpor.kvcache.types import KVCacheSpec
from torpor.models.attention import LayerEvents, PagedBatch, StepContext
from torpor.models.loader import RUNTIME_TAG, LoadedModel
from torpor.scheduler.config import SchedulerConfig
from torpor.scheduler.output import RunnerOutput, ScheduledSequence, SchedulerOutput

if TYPE_CHECKING:
    from torpor.memory import Memory


class Runner:
    """For one thread at a time, while every pool is resident and valid."""

    def __init__(
        self,
        model: LoadedModel,
        kv_caches: Mapping[str, torch.Tensor],
        spec: KVCacheSpec,
        memory: Memory,
        config: SchedulerConfig,
    ) -> None:
        self._model = model
        self._block_size = spec.block_size
        self._kv_caches = tuple(kv_caches[name] for name in model.layer_names)
        self.events: LayerEvents | None = None  # told around every layer's attention
        pool = memory.pool(RUNTIME_TAG, policy="host")
        tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
        self._token_ids = pool.zeros((tokens,), torch.int64)
        self._positions = pool.zeros((tokens,), torch.int64)
        self._slots = pool.zeros((tokens,), torch.int64)
        self._seq_lens = pool.zeros((seqs,), torch.int64)
        longest = min(-(-model.resolved.max_model_len // spec.block_size), spec.num_blocks)
        self._block_tables = pool.zeros((seqs, longest), torch.int64)

    @property
    def kv_caches(self) -> tuple[torch.Tensor, ...]:
        """The tensors attention reads and writes, by layer."""
        return self._kv_caches

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Run the model over ``output.sequences``, write their KV, and sample where asked. Blocks until done. Same input and
        KV, same output.

        BugError when the step does not fit what was configured: nothing was written then.
        """
        # Single tokens first: attention takes them as one batch.
        sequences = sorted(output.sequences, key=lambda s: len(s.token_ids) > 1)
        if not sequences:
            return RunnerOutput()
        self._check(sequences)
        batch, count = self._write_inputs(sequences)
        ends = batch.query_starts[1:]
        rows = [end - 1 for end, s in zip(ends, sequences, strict=True) if s.samples]
        context = StepContext(
            batch=batch,
            step=self._model.backend.begin(batch, self._model.dtype),
            kv_caches=self._kv_caches,
            layer_names=self._model.layer_names,
            events=self.events,
        )
        index = torch.tensor(rows, dtype=torch.int64, device=self._token_ids.device)
        logits = self._model.forward(self._token_ids[:count], self._positions[:count], context, index)
        samples = sample(logits, [s for s in sequences if s.samples]) if rows else Samples()
        return RunnerOutput(sampled=samples.tokens, failed=samples.failed, logprobs=samples.logprobs)

    def _check(self, sequences: Sequence[ScheduledSequence]) -> None:
        tokens = sum(len(s.token_ids) for s in sequences)
        if tokens > len(self._token_ids) or len(sequences) > len(self._seq_lens):
            raise BugError(
                f"a step of {tokens} tokens in {len(sequences)} sequences exceeds max_num_batched_tokens {len(self._token_ids)} "
                f"or max_num_seqs {len(self._seq_lens)}"
            )
        for s in sequences:
            needed = -(-(s.start + len(s.token_ids)) // self._block_size)
            if not s.token_ids or needed > len(s.block_ids) or needed > self._block_tables.shape[1]:
                raise BugError(
                    f"request {s.request_id}: {len(s.token_ids)} tokens from position {s.start} in {len(s.block_ids)} blocks",
                    request_id=s.request_id,
                )

    def _write_inputs(self, sequences: Sequence[ScheduledSequence]) -> tuple[PagedBatch, int]:
        """Fill the persistent inputs. Returns the batch over them, and how many tokens there are."""
        tables = [np.asarray(s.block_ids, dtype=np.int64) for s in sequences]
        spans = [np.arange(s.start, s.start + len(s.token_ids)) for s in sequences]
        positions = np.concatenate(spans)
        blocks = np.concatenate([table[span // self._block_size] for table, span in zip(tables, spans, strict=True)])
        offsets = positions % self._block_size
        starts = (0, *np.cumsum([len(span) for span in spans]).tolist())
        seq_lens = tuple(s.start + len(s.token_ids) for s in sequences)
        count = len(positions)
        self._put(self._token_ids, np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in sequences]))
        self._put(self._positions, positions)
        self._put(self._slots, blocks * self._block_size + offsets)
        self._put(self._seq_lens, np.asarray(seq_lens, dtype=np.int64))
        self._put_tables(tables)
        batch = PagedBatch(
            block_size=self._block_size,
            query_starts=starts,
            seq_lens=seq_lens,
            max_seq_len=max(seq_lens),
            num_single=sum(len(span) == 1 for span in spans),
            slots=self._slots[:count],
            fresh_blocks=torch.from_numpy(blocks[offsets == 0]).to(self._slots.device),
            block_tables=self._block_tables[: len(sequences)],
            seq_lens_tensor=self._seq_lens[: len(sequences)],
        )
        return batch, count

    def _put_tables(self, tables: Sequence[np.ndarray]) -> None:
        width = min(max(map(len, tables)), self._block_tables.shape[1])
        padded = np.zeros((len(tables), width), dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table[:width]
        self._block_tables[: len(tables), :width].copy_(torch.from_numpy(padded))

    @staticmethod
    def _put(target: torch.Tensor, values: np.ndarray) -> None:
        target[: len(values)].copy_(torch.from_numpy(values))
