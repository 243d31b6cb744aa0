"""A prefill/decode pair over ``ipc``, behind a router, against a single engine: first token and throughput.

    python benchmarks/gpu_pair.py                                          # two GPUs, or one for all; the Qwen3-8B shape in bf16
    python benchmarks/gpu_pair.py --driver host --model builtin:smollm2-135m --dtype float32 --quick    # no GPU

P is on the first GPU and D on the second one; the single engine is P's neighbour and computes while the pair is idle. Weights
of ``random:qwen3-8b`` are random: what they say does not change the work. Every prompt is new, so no prefix cache answers. A byte
is a token of that model: a word has some seven.

First token: one request at a time; a pair does what the single engine does and more, P's answer, D's pull of the KV cache, the
last prompt token at D. Throughput: ``--at-once`` requests of the first length, answers of ``--answer`` tokens; a pair on two GPUs
has twice the hardware.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import httpx
import torch

from torpor.cli.load import LoadConfig, Sample, run_load
from torpor.demo.fleet import Fleet, Service
from torpor.demo.random_model import RANDOM_8B, save_random_8b

START_S = 180.0
NAME = "served"


class Clients:
    """Asks services for completions of prompts that nobody has seen."""

    def __init__(self) -> None:
        self._seeds = itertools.count()
        self.prompt_tokens: dict[int, int] = {}  # by the number of words asked for

    def first_token_s(self, url: str, words: int) -> float:
        [sample] = self._ask(url, words, 1, 2)
        self.prompt_tokens[words] = sample.prompt_tokens
        return sample.first_token_s

    def tokens_per_s(self, url: str, words: int, at_once: int, answer: int) -> float:
        begun = time.perf_counter()
        samples = self._ask(url, words, at_once, answer)
        return sum(sample.tokens for sample in samples) / (time.perf_counter() - begun)

    def _ask(self, url: str, words: int, requests: int, answer: int) -> list[Sample]:
        config = LoadConfig(
            url=url,
            requests=requests,
            concurrency=requests,
            prompts=(),
            input_words=words,
            max_tokens=answer,
            ignore_eos=True,
            model=NAME,
            seed=next(self._seeds),
            timeout_s=120.0,
            api_key=None,
        )

        async def ask() -> list[Sample]:
            async with httpx.AsyncClient(timeout=config.timeout_s) as http:
                return await run_load(http, config, lambda: None)

        samples = asyncio.run(ask())
        for sample in samples:
            if sample.error is not None:
                raise SystemExit(f"{url}: {sample.error}")
        return samples


def serve(fleet: Fleet, name: str, model: str, device: int, options: Any, *more: str) -> Service:
    memory = ["--memory-driver", options.driver, "--device", str(device), "--kv-cache-bytes", options.kv_cache_bytes]
    shape = ["--dtype", options.dtype, "--load-format", "random" if options.model == RANDOM_8B else "auto"]
    command = ["serve", model, "--served-model-name", NAME, "--threads", str(options.threads), *memory, *shape, *more]
    return fleet.start(name, command)


def start(run: common.Run, fleet: Fleet, model: str, options: Any) -> tuple[Service, Service, Service]:
    """The single engine, D, and the router. All start at once."""
    kv = ("--enable-sleep-mode", "--kv-connector", "ipc", "--kv-role")
    second = 1 if options.driver == "cuda" and torch.cuda.device_count() > 1 else 0
    single = serve(fleet, "single", model, 0, options)
    prefill = serve(fleet, "P", model, 0, options, *kv, "producer")
    decode = serve(fleet, "D", model, second, options, *kv, "consumer")
    for service in (single, prefill, decode):
        fleet.wait_ready(service, START_S, run.note)
    router = fleet.start("router", ["router", "--prefill", prefill.url, "--decode", decode.url])
    fleet.wait_ready(router, START_S, run.note)
    return single, decode, router


def measure(run: common.Run, fleet: Fleet, model: str, options: Any) -> dict[str, Any]:
    single, decode, router = start(run, fleet, model, options)
    clients, lengths = Clients(), [int(words) for words in options.lengths.split(",")]
    services = {"single": single.url, "pair": router.url}

    def cases(ask: Callable[[str], float]) -> dict[str, common.Samples]:
        return common.interleaved({name: lambda url=url: ask(url) for name, url in services.items()}, options.rounds)  # type: ignore[misc]

    first = {words: cases(lambda url, words=words: clients.first_token_s(url, words)) for words in lengths}  # type: ignore[misc]
    rates = cases(lambda url: clients.tokens_per_s(url, lengths[0], options.at_once, options.answer))
    pulled = fleet.http.get(f"{decode.url}/memory").json()["connector"]
    asked = (options.rounds + 1) * (len(lengths) + options.at_once)
    if pulled["loads_done"] != asked:
        raise SystemExit(f"{asked} requests, but {pulled['loads_done']} loads: D computed prompts itself")
    return {
        "path": pulled["path"],
        "first_token_s": {str(clients.prompt_tokens[words]): found for words, found in first.items()},
        "tokens_per_s": {"prompt_tokens": clients.prompt_tokens[lengths[0]], "at_once": options.at_once, **rates},
    }


def show(run: common.Run, found: dict[str, Any]) -> None:
    rows = []
    for tokens, by in found["first_token_s"].items():
        single, pair = (common.Samples(tuple(1e3 * value for value in by[case].values)) for case in ("single", "pair"))
        rows.append([f"first token of {tokens} tokens, ms", single, pair, f"{pair.median / single.median:.2f}"])
    rates = found["tokens_per_s"]
    what = f"tokens/s, {rates['at_once']} at once, {rates['prompt_tokens']} tokens in"
    rows.append([what, rates["single"], rates["pair"], f"{rates['pair'].median / rates['single'].median:.2f}"])
    run.table("one engine and a pair over ipc, median (lowest-highest)", ["", "single", "pair", "pair / single"], rows)


def main() -> None:
    options = common.arguments(
        __doc__,
        driver="cuda",
        model=RANDOM_8B,
        dtype="bfloat16",
        lengths="140,560,1120",  # words
        rounds=5,
        at_once=16,
        answer=64,
        threads=4,
        kv_cache_bytes="8GiB",
    )
    if options.quick:
        options.lengths, options.rounds, options.at_once, options.answer, options.kv_cache_bytes = "20", 1, 2, 4, "64MiB"
    run = common.Run("gpu_pair", "a prefill/decode pair over ipc against one engine", options.out)
    with tempfile.TemporaryDirectory(prefix="torpor-pair-") as folder:
        model = str(save_random_8b(Path(folder) / "qwen3-8b-random")) if options.model == RANDOM_8B else options.model
        with Fleet(Path(folder)) as fleet:
            found = measure(run, fleet, model, options)
    show(run, found)
    run.write({"model": options.model, "dtype": options.dtype, **found})


if __name__ == "__main__":
    main()
