"""Engines on a GPU for tests: the small models of the unit tests, and whole cores that are stepped by hand."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "unit"))

from tiny_models import BLOCK, NUM_BLOCKS, Driven, drive

from torpor.engine.config import EngineConfig
from torpor.engine.core import EngineCore
from torpor.engine.executor import UniprocExecutor
from torpor.engine.settings import config_from_settings
from torpor.engine.startup import start_core
from torpor.engine.worker import Worker
from torpor.kvcache.config import CacheConfig
from torpor.memory import MemoryConfig
from torpor.models import ModelConfig, resolve_model
from torpor.request import EngineOutput, GenerationRequest, SamplingParams
from torpor.scheduler.config import SchedulerConfig

LEVELS = {
    1: {"weights": "host", "runtime": "host", "kv_cache": "discard", "cuda_graph": "discard"},
    2: {"weights": "discard", "runtime": "host", "kv_cache": "discard", "cuda_graph": "discard"},
}


def gpu_worker(
    folder: Path, *, max_num_seqs: int = 8, max_tokens: int = 32, num_blocks: int = NUM_BLOCKS, **model: Any
) -> Worker:
    """A worker on the cuda driver that is ready to run steps, in float32 unless ``model`` says otherwise."""
    config = EngineConfig(
        model=ModelConfig(source=str(folder), **{"dtype": "float32"} | model),
        memory=MemoryConfig(driver="cuda"),
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens),
    )
    worker = Worker(config, resolve_model(config.model))
    try:
        worker.load()
        worker.initialize_kv_cache(worker.determine_num_blocks())
        worker.warm_up()
        worker.prepare_images()
    except BaseException:
        worker.shutdown()
        raise
    return worker


def texts(worker: Worker, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy answers, the prompts in chunks and joining one after another."""
    sequences = [Driven(str(index), prompt) for index, prompt in enumerate(prompts)]
    drive(worker, sequences, count)
    return [sequence.output for sequence in sequences]


def gpu_core(folder: Path, **settings: Any) -> EngineCore:
    small = {"dtype": "float32", "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "enable_sleep_mode": True}
    return start_core(config_from_settings(str(folder), driver="cuda", **small | settings))


def worker_of(core: EngineCore) -> Worker:
    executor = core.executor
    assert isinstance(executor, UniprocExecutor)
    assert isinstance(executor.worker, Worker)
    return executor.worker


def done(core: EngineCore, ticket: Future[dict[str, Any]]) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while not ticket.done() and time.monotonic() < deadline:
        core.step()
        time.sleep(0.0005)
    return ticket.result(0)


def answers(core: EngineCore, prompts: list[list[int]], count: int, name: str = "r") -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    tokens: dict[str, list[int]] = {f"{name}{index}": [] for index in range(len(prompts))}
    for request_id, prompt in zip(tokens, prompts, strict=True):
        core.add(GenerationRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
    left = len(prompts)
    while left:
        outputs: list[EngineOutput] = core.step()
        for output in outputs:
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
            left -= output.finish_reason is not None
    return list(tokens.values())
