"""What the engine asks of a GPU through torch: whether it is there, that it is done, and how much memory is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torpor.engine.inputs import StepInputs
from torpor.engine.runner import Runner
from torpor.errors import ConfigurationError, DeviceMemoryError
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.models import LoadedModel
from torpor.request import SamplingParams
from torpor.scheduler.config import SchedulerConfig
from torpor.scheduler.output import ScheduledSequence, SchedulerOutput
from torpor.scheduler.token_counts import TokenCounts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torpor.memory import Memory

_SLACK_BYTES = 384 << 20  # code that the driver loads late, captured graphs, and what the allocator loses in pieces
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=0)  # sampling at its most expensive


def use_gpu(ordinal: int) -> None:
    """Makes it this thread's device. ConfigurationError when torch cannot use it."""
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU (driver too old?)"
        raise ConfigurationError(f"memory driver cuda: {why}", setting="driver", value="cuda")
    if ordinal >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device {ordinal} does not exist: torch sees {torch.cuda.device_count()} GPUs", setting="device", value=ordinal
        )
    torch.cuda.set_device(ordinal)


def gpu_facts(ordinal: int) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(ordinal)
    return {"GPU": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"}


def let_go(ordinal: int) -> None:
    """All work that was queued is done, and memory that torch only keeps for later is given back. Blocks."""
    torch.cuda.synchronize(ordinal)
    torch.cuda.empty_cache()


def follow_memory(memory: Memory, tags: Iterable[str]) -> None:
    """Before memory of these tags is copied or unmapped, the GPU is done with it."""
    for tag in tags:
        memory.register_tag_hooks(tag, before_unmap=lambda: let_go(memory.config.device), name="torch streams")


class _Unpooled:
    """Stands in for a pool: tensors of torch's own that go with the profile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


def kv_budget_bytes(model: LoadedModel, config: SchedulerConfig, block_size: int, utilization: float) -> int:
    """What the KV cache may take: ``utilization`` of the GPU, less what is taken on it now (by whomever), less what the largest
    step takes beside the cache. Runs such a step. DeviceMemoryError when nothing is left."""
    ordinal = model.device.index or 0
    step = _measure(ordinal, lambda: _largest_step(model, config, block_size))
    let_go(ordinal)
    free, total = torch.cuda.mem_get_info(ordinal)
    logits = config.seats * model.vocab_size * model.dtype.itemsize
    reserve = step + logits + _SLACK_BYTES
    budget = int(total * utilization) - (total - free) - reserve
    if budget <= 0:
        raise DeviceMemoryError(
            f"no memory is left for a KV cache: {free} bytes of {total} are free, the largest step takes {reserve} and "
            f"gpu_memory_utilization {utilization:g} leaves {total - int(total * utilization)} to others",
            bytes_needed=reserve + total - int(total * utilization),
            bytes_free=free,
        )
    return budget


def _measure(ordinal: int, run: Callable[[], None]) -> int:
    """Bytes that torch's allocator took from the device at most while ``run`` ran."""
    let_go(ordinal)
    before = torch.cuda.memory_reserved(ordinal)
    torch.cuda.reset_peak_memory_stats(ordinal)
    run()
    return torch.cuda.max_memory_reserved(ordinal) - before


def _largest_step(model: LoadedModel, config: SchedulerConfig, block_size: int) -> None:
    """As many tokens and sequences as a step may have, over one layer's small cache that all layers share."""
    counts = _shares(min(config.token_budget, config.seats * model.resolved.max_model_len), config.seats)
    blocks = -(-max(counts) // block_size)
    spec = model.kv_spec(blocks, block_size)
    shape = (2, blocks, block_size, spec.num_kv_heads, spec.head_dim)
    cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
    inputs = StepInputs(
        _Unpooled(model.device),
        max_tokens=config.token_budget,
        max_seqs=config.seats,
        blocks_per_seq=blocks,
        block_size=block_size,
    )
    runner = Runner(model, dict.fromkeys(model.layer_names, cache), spec, inputs)
    runner.execute(SchedulerOutput(step=0, sequences=[_prompt(index, count, spec) for index, count in enumerate(counts)]))


def _shares(tokens: int, seqs: int) -> list[int]:
    count = min(tokens, seqs)
    return [tokens // count + (index < tokens % count) for index in range(count)]


def _prompt(index: int, count: int, spec: KVCacheSpec) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=str(index),
        token_ids=[0] * count,
        start=0,
        block_ids=[BlockId(block) for block in range(-(-count // spec.block_size))],
        samples=True,
        sampling=_SAMPLED,
        counts=TokenCounts([], []),
    )
