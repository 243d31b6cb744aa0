"""Small random models on disk, and a stand-in for the scheduler that drives a worker through chunks and mixed batches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from torpor.engine.config import EngineConfig
from torpor.engine.worker import Worker
from torpor.kvcache.config import CacheConfig
from torpor.models import ModelConfig, resolve_model
from torpor.models.quiet import quiet_transformers
from torpor.request import SamplingParams
from torpor.scheduler.config import SchedulerConfig
from torpor.scheduler.output import RunnerOutput, ScheduledSequence, SchedulerOutput
from torpor.scheduler.token_counts import TokenCounts

VOCAB = 128
BLOCK = 4
NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0, seed=0)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_SLIDING: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def tiny_config(family: str, **changes: Any) -> Any:
    kinds = {
        "llama": (LlamaConfig, {"tie_word_embeddings": True}),
        "qwen2": (Qwen2Config, {}),
        "qwen3": (Qwen3Config, {"head_dim": 32}),
        "gemma3": (Gemma3TextConfig, _SLIDING),
        "gemma2": (Gemma2Config, _SLIDING | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
        "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    }
    kind, special = kinds[family]
    return kind(**_COMMON | special | changes)


def save_tiny(folder: Path, family: str = "llama", *, seed: int = 1, **changes: Any) -> Any:
    """Writes a model with weights large enough that it does not repeat itself; returns the transformers model."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
    with quiet_transformers():
        model.save_pretrained(folder)
    return model


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def make_worker(
    folder: Path, *, num_blocks: int = NUM_BLOCKS, max_num_seqs: int = 8, max_tokens: int = 32, **model: Any
) -> Worker:
    """A worker that is ready to run steps, in float32 with one thread."""
    config = EngineConfig(
        model=ModelConfig(source=str(folder), **{"dtype": "float32", "threads": 1} | model),
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens),
    )
    worker = Worker(config, resolve_model(config.model))
    worker.load()
    worker.initialize_kv_cache(worker.determine_num_blocks())
    return worker


@dataclass
class Driven:
    """One sequence as the driver knows it."""

    name: str
    prompt: list[int]
    sampling: SamplingParams = GREEDY
    tokens: list[int] = field(default_factory=list)  # prompt and output
    done: int = 0
    blocks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def take(self, count: int, free: list[int]) -> ScheduledSequence:
        """The next ``count`` tokens as a share of a step; blocks come from ``free``."""
        while len(self.blocks) * BLOCK < self.done + count:
            self.blocks.append(free.pop())
        start, self.done = self.done, self.done + count
        return ScheduledSequence(
            request_id=self.name,
            token_ids=self.tokens[start : self.done],
            start=start,
            block_ids=list(self.blocks),
            samples=self.done == len(self.tokens),
            sampling=self.sampling,
            counts=TokenCounts(self.prompt, self.output),
        )


def run_step(worker: Worker, sequences: list[ScheduledSequence], step: int = 0) -> RunnerOutput:
    return worker.execute(SchedulerOutput(step=step, sequences=sequences))


def drive(worker: Worker, sequences: list[Driven], count: int, *, chunk: int = 7, budget: int = 32, seed: int = 0) -> None:
    """Generate ``count`` tokens each: prompts in chunks, sequences joining two steps apart, blocks in random order."""
    taken = {block for s in sequences for block in s.blocks}
    free = [block for block in range(NUM_BLOCKS) if block not in taken]
    random.Random(seed).shuffle(free)
    step = 0
    while any(len(s.output) < count for s in sequences):
        left, batch = budget, []
        for index, sequence in enumerate(sequences):
            share = min(len(sequence.tokens) - sequence.done, chunk, left)
            if len(sequence.output) < count and step >= 2 * index and share > 0:
                batch.append(sequence.take(share, free))
                left -= share
        result = run_step(worker, batch, step)
        assert result.failed == {}
        for sequence in sequences:
            if sequence.name in result.sampled:
                sequence.tokens.append(result.sampled[sequence.name])
        step += 1


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
