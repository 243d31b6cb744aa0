"""Time to the first token of a prefill/decode pair behind a router, against a single engine, per connector.

    .venv/bin/python benchmarks/pd_first_token.py                     # under four minutes, five engines in turn
    .venv/bin/python benchmarks/pd_first_token.py --connectors ipc --lengths 50 --rounds 1

Real processes on loopback, asked by streaming completions, one request at a time. Every prompt is new: no prefix cache answers. A
pair does what the single engine does and more: P's prefill, P's answer, D's pull of the KV cache, and the last prompt token at D.
What the pair adds is shown in milliseconds and per token; the single engine is asked next to the pair in every round.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import httpx

from torpor.cli.load import LoadConfig, Sample, run_load
from torpor.demo.fleet import Fleet, Service

START_S = 180.0


class Clients:
    """Asks services for the first token of prompts nobody has seen."""

    def __init__(self, model: str) -> None:
        self._model = Path(model).name.rpartition(":")[2]
        self._seeds = itertools.count()
        self.prompt_tokens: dict[int, int] = {}  # by the number of words asked for

    def first_token_s(self, url: str, words: int) -> float:
        [sample] = asyncio.run(self._ask(url, words))
        if sample.error is not None:
            raise SystemExit(f"{url}: {sample.error}")
        self.prompt_tokens[words] = sample.prompt_tokens
        return sample.first_token_s

    async def _ask(self, url: str, words: int) -> list[Sample]:
        config = LoadConfig(
            url=url,
            requests=1,
            concurrency=1,
            prompts=(),
            input_words=words,
            max_tokens=2,
            ignore_eos=True,
            model=self._model,
            seed=next(self._seeds),
            timeout_s=120.0,
            api_key=None,
        )
        async with httpx.AsyncClient(timeout=config.timeout_s) as http:
            return await run_load(http, config, lambda: None)


def serve(fleet: Fleet, name: str, options: Any, *more: str) -> Service:
    flags = ["--dtype", "float32", "--threads", str(options.threads), "--kv-cache-bytes", options.kv_cache_bytes]
    return fleet.start(name, ["serve", options.model, *flags, *more])


def compare(run: common.Run, connector: str, clients: Clients, options: Any, lengths: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as folder, Fleet(Path(folder)) as fleet:
        kv = ("--enable-sleep-mode", "--kv-connector", connector, "--kv-role")
        single = serve(fleet, "single", options)
        prefill, decode = serve(fleet, "P", options, *kv, "producer"), serve(fleet, "D", options, *kv, "consumer")
        for service in (single, prefill, decode):
            fleet.wait_ready(service, START_S, run.note)
        router = fleet.start("router", ["router", "--prefill", prefill.url, "--decode", decode.url])
        fleet.wait_ready(router, START_S, run.note)
        results = {words: measure(clients, single.url, router.url, words, options.rounds) for words in lengths}
        pulled = fleet.http.get(f"{decode.url}/memory").json()["connector"]
    asked = len(lengths) * (options.rounds + 1)
    if pulled["loads_done"] != asked:
        raise SystemExit(f"{connector}: {asked} requests, but {pulled['loads_done']} loads: D computed prompts itself")
    show(run, f"{connector} ({pulled['path']})", clients, results)
    return {
        "path": pulled["path"],
        "lengths": {
            str(clients.prompt_tokens[words]): {**found, "added_s": added(found), "pair_over_single": over(found)}
            for words, found in results.items()
        },
    }


def measure(clients: Clients, single: str, pair: str, words: int, rounds: int) -> dict[str, common.Samples]:
    cases: dict[str, Callable[[], float]] = {
        "single": lambda: clients.first_token_s(single, words),
        "pair": lambda: clients.first_token_s(pair, words),
    }
    return common.interleaved(cases, rounds)


def added(found: dict[str, common.Samples]) -> float:
    return found["pair"].median - found["single"].median


def over(found: dict[str, common.Samples]) -> float:
    return found["pair"].median / found["single"].median


def show(run: common.Run, name: str, clients: Clients, results: dict[int, dict[str, common.Samples]]) -> None:
    rows = []
    for words, found in results.items():
        tokens = clients.prompt_tokens[words]
        milliseconds = (common.Samples(tuple(1e3 * v for v in found[case].values)) for case in ("single", "pair"))
        rows.append([f"{tokens} tokens", *milliseconds, 1e3 * added(found), f"{over(found):.2f}"])
    run.table(f"{name}: ms to the first token, median (lowest-highest)", ["", "single", "pair", "added", "pair / single"], rows)


def main() -> None:
    options = common.arguments(
        __doc__,
        model="builtin:smollm2-135m",
        connectors="ipc,nixl",
        lengths="40,440,1400",  # words; about as many tokens and a tenth more
        rounds=3,
        threads=1,
        kv_cache_bytes="256MiB",
    )
    if options.quick:
        options.connectors, options.lengths, options.rounds, options.kv_cache_bytes = "ipc", "4", 1, "4MiB"
    run = common.Run("pd_first_token", "time to the first token: prefill/decode pair against a single engine", options.out)
    clients = Clients(options.model)
    lengths = [int(words) for words in options.lengths.split(",")]
    results = {name: compare(run, name, clients, options, lengths) for name in options.connectors.split(",")}
    run.write({"threads": options.threads, **results})


if __name__ == "__main__":
    main()
