"""Tokens per second of an engine against ``transformers.generate``: the same model, dtype, threads and prompts.

    .venv/bin/python benchmarks/engine_throughput.py              # under four minutes
    .venv/bin/python benchmarks/engine_throughput.py --quick      # one short round, to see that it runs

    batch 1       one prompt
    batch 8       eight prompts of different lengths, padded on the left for generate
    arriving      32 requests of mixed lengths, one every --every-s seconds, against one after another, in the same engine

The engine is asked through its client, with its scheduler, sampler and streams: what a program that embeds it gets. Its prefix
cache is off, so that a second round does not find the first one's answers. Beside the wall time stands the processor time, which
other people's work disturbs less.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import common
import torch
from transformers import AutoModelForCausalLM

from torpor.engine.client import InprocEngineClient
from torpor.engine.settings import config_from_settings
from torpor.models import ModelConfig, ResolvedModel, resolve_model
from torpor.models.quiet import quiet_transformers
from torpor.request import GenerationRequest, SamplingParams

GOAL_OF_GENERATE, GOAL_ARRIVING = 1.0, 2.0
BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts and how many tokens to generate for each."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.max_tokens)


def draw(vocabulary: int, seed: int, prompt_tokens: tuple[int, int], max_tokens: tuple[int, int], count: int) -> Work:
    """``count`` requests with lengths from the given ranges. Token ids at random: what they say does not change the work."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(*prompt_tokens))] for _ in range(count)]
    return Work(prompts=prompts, max_tokens=[rng.randint(*max_tokens) for _ in range(count)])


@dataclass
class Timed:
    """A case of ``common.interleaved``: tokens per second by the wall clock; processor time and answers beside it."""

    run: Callable[[Work], list[list[int]]]
    work: Work
    cpu_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def __call__(self) -> float:
        wall, cpu = time.perf_counter(), time.process_time()
        self.answers = self.run(self.work)
        self.cpu_s.append(time.process_time() - cpu)
        seconds = time.perf_counter() - wall
        if [len(answer) for answer in self.answers] != self.work.max_tokens:
            raise SystemExit("an answer is shorter or longer than what was asked for")
        return self.work.tokens / seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.work.tokens / statistics.median(self.cpu_s)


class Transformers:
    """``generate`` with its defaults; one number of tokens for the whole batch, as it can do no other."""

    def __init__(self, resolved: ResolvedModel) -> None:
        with quiet_transformers():
            model: Any = AutoModelForCausalLM.from_pretrained(resolved.path, dtype=torch.float32, local_files_only=True)
        model.generation_config.eos_token_id = None
        self._model = model.eval()

    def run(self, work: Work) -> list[list[int]]:
        longest = max(map(len, work.prompts))
        ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = self._model.generate(ids, attention_mask=mask, max_new_tokens=max(work.max_tokens), do_sample=False, pad_token_id=0)
        return [row[:count] for row, count in zip(out[:, longest:].tolist(), work.max_tokens, strict=True)]


class Engine:
    """An engine in this process, and the event loop it is asked from."""

    def __init__(self, model: str, threads: int, num_blocks: int) -> None:
        config = config_from_settings(
            model, dtype="float32", threads=threads, num_blocks=num_blocks, block_size=BLOCK, enable_prefix_caching=False
        )
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(InprocEngineClient.start(config))
        self.first_token_s: list[float] = []  # of the last run's requests, from their arrival

    def close(self) -> None:
        self._loop.run_until_complete(self._client.shutdown())
        self._loop.close()

    def together(self, work: Work) -> list[list[int]]:
        return self.arriving(work, 0.0)

    def arriving(self, work: Work, every_s: float) -> list[list[int]]:
        """A request every ``every_s`` seconds, whether or not those before it are done."""
        self.first_token_s = []
        asked = [self._ask(work, index, index * every_s) for index in range(len(work.prompts))]
        return self._loop.run_until_complete(_all(asked))

    def one_after_another(self, work: Work) -> list[list[int]]:
        self.first_token_s = []
        return [self._loop.run_until_complete(self._ask(work, index, 0.0)) for index in range(len(work.prompts))]

    async def _ask(self, work: Work, index: int, after_s: float) -> list[int]:
        await asyncio.sleep(after_s)
        began = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=work.max_tokens[index], ignore_eos=True)
        request = GenerationRequest(request_id=str(index), prompt_token_ids=work.prompts[index], sampling=sampling)
        tokens: list[int] = []
        async with aclosing(self._client.generate(request)) as outputs:
            async for output in outputs:
                if not tokens:
                    self.first_token_s.append(time.perf_counter() - began)
                tokens += output.new_token_ids
        return tokens


async def _all(asked: list[Any]) -> list[list[int]]:
    return list(await asyncio.gather(*asked))


# ---- the two comparisons ---------------------------------------------------------------------------------------------------


def against_generate(run: common.Run, name: str, engine: Engine, other: Transformers, work: Work, rounds: int) -> dict[str, Any]:
    cases = {"torpor": Timed(engine.together, work), "transformers": Timed(other.run, work)}
    measured = common.interleaved(cases, rounds)
    ours, theirs = cases["torpor"], cases["transformers"]
    same = sum(a == b for a, b in zip(ours.answers, theirs.answers, strict=True))
    wall = measured["torpor"].median / measured["transformers"].median
    cpu = ours.tokens_per_cpu_s / theirs.tokens_per_cpu_s
    rows: list[list[Any]] = [[case, measured[case], cases[case].tokens_per_cpu_s] for case in cases]
    title = f"{name}: prompts of {sorted(map(len, work.prompts))} tokens, {work.max_tokens[0]} generated for each"
    rows.append(["torpor / transformers", f"{wall:.2f}", f"{cpu:.2f}"])
    run.table(title, ["", "tokens/s", "tokens/s of processor time"], rows)
    run.note(f"answers equal token for token: {same} of {len(work.prompts)}")
    return {**measured, "torpor_over_transformers": wall, "torpor_over_transformers_cpu": cpu, "same_answers": same}


def arriving_against_one_by_one(run: common.Run, engine: Engine, work: Work, every_s: float, rounds: int) -> dict[str, Any]:
    first: dict[str, list[float]] = {}

    def noted(name: str, ask: Callable[[Work], list[list[int]]]) -> Timed:
        def run_it(asked: Work) -> list[list[int]]:
            answers = ask(asked)
            first[name] = engine.first_token_s
            return answers

        return Timed(run_it, work)

    cases = {
        "arriving": noted("arriving", lambda asked: engine.arriving(asked, every_s)),
        "one after another": noted("one after another", engine.one_after_another),
    }
    measured = common.interleaved(cases, rounds, warmup=0)
    times = measured["arriving"].median / measured["one after another"].median
    rows: list[list[Any]] = [
        [name, samples, work.tokens / samples.median, statistics.median(first[name])] for name, samples in measured.items()
    ]
    title = f"{len(work.prompts)} requests, one every {every_s:g} s; {sum(map(len, work.prompts))} prompt tokens"
    rows.append(["arriving / one after another", f"{times:.2f}", "", ""])
    run.table(title, ["", "tokens/s", "s in all", "s to first token"], rows)
    return {**measured, "times_as_fast": times, "median_first_token_s": {k: statistics.median(v) for k, v in first.items()}}


def main() -> None:
    options = common.arguments(
        __doc__,
        model="builtin:smollm2-135m",
        threads=1,
        rounds=3,
        every_s=0.1,
        seed=0,
    )
    torch.set_num_threads(options.threads)
    run = common.Run("engine_throughput", f"engine against transformers.generate, {options.threads} threads each", options.out)
    resolved = resolve_model(ModelConfig(source=options.model))
    vocabulary, seed = resolved.hf_config.vocab_size, options.seed
    if options.quick:
        rounds, tokens, count, every_s, lengths = 1, 4, 4, 0.01, (4, 16)
    else:
        rounds, tokens, count, every_s, lengths = options.rounds, 48, 32, options.every_s, (16, 128)
    other, engine = Transformers(resolved), Engine(options.model, options.threads, num_blocks=64 if options.quick else 512)
    try:
        one = draw(vocabulary, seed, (lengths[1] // 2,) * 2, (tokens,) * 2, 1)
        eight = draw(vocabulary, seed, lengths, (tokens,) * 2, 8)
        mixed = draw(vocabulary, seed, lengths, (max(1, tokens // 6), tokens), count)
        results = {
            "threads": options.threads,
            "batch_1": against_generate(run, "batch 1", engine, other, one, rounds),
            "batch_8": against_generate(run, "batch 8", engine, other, eight, rounds),
            "arriving": arriving_against_one_by_one(run, engine, mixed, every_s, max(1, rounds - 1)),
        }
    finally:
        engine.close()
    goals = {
        f"{name}: {results[key]['torpor_over_transformers']:.2f} of generate, goal {GOAL_OF_GENERATE:g}": (
            results[key]["torpor_over_transformers"] >= GOAL_OF_GENERATE
        )
        for name, key in (("batch 1", "batch_1"), ("batch 8, padded", "batch_8"))
    }
    times = results["arriving"]["times_as_fast"]
    goals[f"arriving: {times:.2f} times as fast as one after another, goal {GOAL_ARRIVING:g}"] = times >= GOAL_ARRIVING
    run.write(results, goals)


if __name__ == "__main__":
    main()
