"""The scheduler alone: steps per second with 1,000 requests running and 10,000 waiting. No model, and no torch in the process.

    .venv/bin/python benchmarks/scheduler_steps.py
    .venv/bin/python benchmarks/scheduler_steps.py --quick

    full       nobody ends: 1,000 decodes a step, 10,000 wait
    busy       requests end and others begin all the time: a finished one is replaced, so that as many wait as before
    one        a single request: what a step costs at least

A step is ``schedule`` and ``update``; the runner's answer is made up, and making it is not counted. The garbage collector is set
as in a core process. Seconds are of processor time: nothing in a step waits, so a busy machine measures nearly the same.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import common

from torpor.engine import collector
from torpor.kvcache.manager import KVCacheManager
from torpor.request import GenerationRequest, SamplingParams
from torpor.scheduler import RunnerOutput, Scheduler, SchedulerConfig, SchedulerOutput

BLOCK = 16
GOAL_STEPS_PER_S = 100.0  # of 1,000 running: 100,000 tokens/s


@dataclass(frozen=True, kw_only=True)
class Load:
    running: int
    waiting: int
    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]


class Requests:
    """A scheduler under a load that stays what it is."""

    def __init__(self, load: Load, seed: int) -> None:
        self._load = load
        self._rng = random.Random(seed)
        self._ids = itertools.count()
        most = load.prompt_tokens[1] + load.max_tokens[1]
        blocks = (load.running + 1) * -(-most // BLOCK) * 102 // 100  # the planner keeps one in a hundred free
        config = SchedulerConfig(
            max_num_seqs=load.running,
            max_num_batched_tokens=max(8192, 2 * load.running),
            max_waiting=load.running + load.waiting + 1,
        )
        self.scheduler = Scheduler(config, KVCacheManager(blocks, BLOCK), max_model_len=4 * most)
        for _ in range(load.running + load.waiting):
            self.add()
        while self.step()[1] < load.running:  # until as many run as are to run
            pass

    def add(self) -> None:
        draw, load = self._rng.randint, self._load
        prompt = [self._rng.randrange(1 << 15) for _ in range(draw(*load.prompt_tokens))]
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=draw(*load.max_tokens), ignore_eos=True)
        self.scheduler.add(GenerationRequest(request_id=f"r{next(self._ids)}", prompt_token_ids=prompt, sampling=sampling))

    def step(self) -> tuple[float, int]:
        """Seconds, and how many sequences were in it."""
        began = time.thread_time()
        output = self.scheduler.schedule()
        planned = time.thread_time() - began
        assert output is not None
        result = self._answer(output)
        began = time.thread_time()
        done = sum(o.finish_reason is not None for o in self.scheduler.update(output, result))
        seconds = planned + time.thread_time() - began
        for _ in range(done):
            self.add()
        return seconds, len(output.sequences)

    def _answer(self, output: SchedulerOutput) -> RunnerOutput:
        return RunnerOutput(sampled={s.request_id: self._rng.randrange(1 << 15) for s in output.sequences if s.samples})


@dataclass(frozen=True, kw_only=True)
class Figures:
    step_s: list[float]
    sequences_per_step: float
    waiting: int
    preemptions: int

    @property
    def steps_per_s(self) -> common.Samples:
        """By tenths of the run."""
        size = max(1, len(self.step_s) // 10)
        parts = [self.step_s[at : at + size] for at in range(0, len(self.step_s), size)]
        return common.Samples(tuple(len(part) / sum(part) for part in parts))

    def as_json(self) -> dict[str, Any]:
        ordered = sorted(self.step_s)
        return {
            "steps": len(ordered),
            "steps_per_s": self.steps_per_s,
            "median_step_ms": 1e3 * statistics.median(ordered),
            "p99_step_ms": 1e3 * ordered[len(ordered) * 99 // 100],
            "sequences_per_step": self.sequences_per_step,
            "us_per_sequence": 1e6 * statistics.median(ordered) / self.sequences_per_step,
            "waiting": self.waiting,
            "preemptions": self.preemptions,
        }


def measure(load: Load, seconds: float, seed: int) -> Figures:
    requests = Requests(load, seed)
    for _ in range(3):
        requests.step()
    began, times, sequences = time.perf_counter(), [], []
    while time.perf_counter() - began < seconds:
        took, count = requests.step()
        times.append(took)
        sequences.append(count)
    stats = requests.scheduler.stats()
    requests.scheduler.check_integrity()
    return Figures(
        step_s=times,
        sequences_per_step=statistics.fmean(sequences),
        waiting=stats.waiting,
        preemptions=stats.preemptions,
    )


def main() -> None:
    options = common.arguments(__doc__, running=1000, waiting=10_000, seconds=15.0, seed=0)
    running, waiting, seconds = (20, 50, 0.2) if options.quick else (options.running, options.waiting, options.seconds)
    run = common.Run("scheduler_steps", f"the scheduler alone: {running} running, {waiting} waiting", options.out)
    loads = {
        "full": Load(running=running, waiting=waiting, prompt_tokens=(16, 256), max_tokens=(4096,) * 2),
        "busy": Load(running=running, waiting=waiting, prompt_tokens=(16, 256), max_tokens=(16, 64)),
        "one": Load(running=1, waiting=0, prompt_tokens=(16, 16), max_tokens=(50_000,) * 2),
    }
    collector.settle()
    figures = {name: measure(load, seconds, options.seed) for name, load in loads.items()}
    rows = []
    for name, f in figures.items():
        found = f.as_json()
        keys = ("median_step_ms", "p99_step_ms", "us_per_sequence", "sequences_per_step")
        rows.append([name, f.steps_per_s, *(found[key] for key in keys), f.waiting])
    run.table("", ["", "steps/s", "ms a step", "p99 ms", "us a sequence", "sequences", "waiting"], rows)
    torch_loaded = sorted({"torch", "numpy"} & sys.modules.keys())
    if torch_loaded:
        raise SystemExit(f"the scheduler brought in {', '.join(torch_loaded)}")
    goals = {
        f"{name}: {figures[name].steps_per_s.median:.0f} steps/s, goal {GOAL_STEPS_PER_S:g}": (
            figures[name].steps_per_s.median >= GOAL_STEPS_PER_S
        )
        for name in ("full", "busy")
    }
    run.write({name: f.as_json() for name, f in figures.items()}, goals)


if __name__ == "__main__":
    main()
