"""Running one step of the model: from the scheduler's output to sampled tokens.

The runner keeps no state of requests: what a step computes depends on its arguments and the KV cache alone. What it keeps are
the step's inputs (``inputs``), in pool ``runtime``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torpor.engine.inputs import StepInputs, StepTensors
from torpor.engine.sampler import Samples, sample
from torpor.errors import BugError, DeviceError, DeviceMemoryError, TorporError
from torpor.kvcache.types import KVCacheSpec
from torpor.models.attention import LayerEvents, StepContext
from torpor.models.loader import RUNTIME_TAG, LoadedModel
from torpor.scheduler.output import RunnerOutput, ScheduledSequence, SchedulerOutput


class Runner:
    """Runs every step eagerly. For one thread at a time, while every pool is resident and valid."""

    def __init__(
        self,
        model: LoadedModel,
        kv_caches: Mapping[str, torch.Tensor],
        spec: KVCacheSpec,
        inputs: StepInputs,
    ) -> None:
        self._model = model
        self._kv_caches = tuple(kv_caches[name] for name in model.layer_names)
        self.events: LayerEvents | None = None  # told around every layer's attention
        self.max_seq_len = min(model.resolved.max_model_len, spec.num_blocks * spec.block_size)
        self.inputs = inputs

    @property
    def kv_caches(self) -> tuple[torch.Tensor, ...]:
        """The tensors attention reads and writes, by layer."""
        return self._kv_caches

    @property
    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """What the runner keeps on the device, by the tag whose pool it lies in."""
        return {RUNTIME_TAG: self.inputs.tensors}

    def forget(self) -> None:
        """What the runner had written to its pools is lost."""
        self.inputs.forget()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Run the model over ``output.sequences``, write their KV, and sample where asked. Blocks until done. Same input and
        KV, same output.

        BugError when the step does not fit what was configured: nothing was written then. DeviceMemoryError, DeviceError.
        """
        # Single tokens first: attention takes them as one batch.
        sequences = sorted(output.sequences, key=lambda s: len(s.token_ids) > 1)
        if not sequences:
            return RunnerOutput()
        self._check(sequences)
        try:
            samples = self._compute(sequences, [s for s in sequences if s.samples])
        except BaseException as error:
            self.inputs.forget()  # nobody knows how much of them the device has
            ours = _translated(error, output)
            if ours is None:
                raise
            raise ours from error
        return RunnerOutput(sampled=samples.tokens, failed=samples.failed, logprobs=samples.logprobs)

    def _compute(self, sequences: Sequence[ScheduledSequence], sampling: Sequence[ScheduledSequence]) -> Samples:
        step = self.inputs.write(sequences, fresh=self._model.backend.clears_blocks)
        ends = step.batch.query_starts[1:]
        rows = [end - 1 for end, s in zip(ends, sequences, strict=True) if s.samples]
        logits = self.forward(step, rows)
        return sample(logits, sampling) if sampling else self._unsampled()

    def _unsampled(self) -> Samples:
        """Nothing is brought to the host, which else is what waits for the step to end."""
        if self.inputs.packed.is_cuda:
            torch.cuda.current_stream(self.inputs.packed.device).synchronize()
        return Samples()

    def forward(self, step: StepTensors, rows: Sequence[int]) -> torch.Tensor:
        """The step's KV is written, and -> logits [R, vocabulary] of the tokens ``rows``. On a GPU only queued."""
        index = torch.tensor(rows, dtype=torch.int64, device=step.token_ids.device)
        return self._model.forward(step.token_ids, step.positions, self.context(step), index)

    def context(self, step: StepTensors) -> StepContext:
        return StepContext(
            batch=step.batch,
            step=self._model.backend.begin(step.batch, self._model.dtype),
            kv_caches=self._kv_caches,
            layer_names=self._model.layer_names,
            events=self.events,
        )

    def _check(self, sequences: Sequence[ScheduledSequence]) -> None:
        inputs = self.inputs
        tokens = sum(len(s.token_ids) for s in sequences)
        if tokens > inputs.max_tokens or len(sequences) > inputs.max_seqs:
            raise BugError(
                f"a step of {tokens} tokens in {len(sequences)} sequences exceeds max_num_batched_tokens {inputs.max_tokens} "
                f"or max_num_seqs {inputs.max_seqs}"
            )
        for s in sequences:
            needed = -(-(s.start + len(s.token_ids)) // inputs.block_size)
            if not s.token_ids or needed > len(s.block_ids) or needed > inputs.blocks_per_seq:
                raise BugError(
                    f"request {s.request_id}: {len(s.token_ids)} tokens from position {s.start} in {len(s.block_ids)} blocks",
                    request_id=s.request_id,
                )


def _translated(error: BaseException, output: SchedulerOutput) -> TorporError | None:
    """torch's errors as ours; None for others."""
    step = f"a step of {output.num_tokens} tokens in {len(output.sequences)} sequences"
    if isinstance(error, torch.OutOfMemoryError):
        free = torch.cuda.mem_get_info()[0]
        hint = "lower max_num_batched_tokens, or gpu_memory_utilization where others use the GPU too"
        return DeviceMemoryError(
            f"{step} found no memory for its intermediate results ({free} bytes free): {hint}", bytes_free=free
        )
    if isinstance(error, torch.AcceleratorError):
        return DeviceError(f"{step} failed on the device: {error}", operation="step")
    return None
