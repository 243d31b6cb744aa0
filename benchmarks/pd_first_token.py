"""Time to the first token with KV that comes from elsewhere, against a single engine that computes it, per connector.

    .venv/bin/python benchmarks/pd_first_token.py                     # under five minutes: seven connectors in turn
    .venv/bin/python benchmarks/pd_first_token.py --connectors ipc --lengths 50 --rounds 1

Real processes on loopback, asked by streaming completions, one request at a time. A pair behind a router is asked prompts that
nobody has seen: it does what the single engine does and more, P's prefill, P's answer, D's pull of the KV cache, and the last
prompt token at D. One that keeps KV for itself (``offload``, ``lmcache``) is asked a prompt, sleeps, wakes, is asked again. The
single engine is asked next to each in every round; ratios are of medians.
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
from connectors import free_peer, installed

from torpor.cli.load import LoadConfig, Sample, run_load
from torpor.demo.fleet import Fleet, Service

START_S = 180.0
KEEP = ("offload", "lmcache")
Lengths = dict[int, dict[str, common.Samples]]


class Clients:
    """Asks services for the first token of prompts: new ones, unless a number is given."""

    def __init__(self, model: str) -> None:
        self._model = Path(model).name.rpartition(":")[2]
        self._numbers = itertools.count()
        self.prompt_tokens: dict[int, int] = {}  # by the number of words asked for

    def number(self) -> int:
        return next(self._numbers)

    def first_token_s(self, url: str, words: int, number: int | None = None) -> float:
        [sample] = asyncio.run(self._ask(url, words, self.number() if number is None else number))
        if sample.error is not None:
            raise SystemExit(f"{url}: {sample.error}")
        self.prompt_tokens[words] = sample.prompt_tokens
        return sample.first_token_s

    async def _ask(self, url: str, words: int, number: int) -> list[Sample]:
        config = LoadConfig(
            url=url,
            requests=1,
            concurrency=1,
            prompts=(),
            input_words=words,
            max_tokens=2,
            ignore_eos=True,
            model=self._model,
            seed=number,
            timeout_s=120.0,
            api_key=None,
        )
        async with httpx.AsyncClient(timeout=config.timeout_s) as http:
            return await run_load(http, config, lambda: None)


def serve(fleet: Fleet, name: str, options: Any, *more: str) -> Service:
    flags = ["--dtype", "float32", "--threads", str(options.threads), "--kv-cache-bytes", options.kv_cache_bytes]
    return fleet.start(name, ["serve", options.model, *flags, *more])


class Bench:
    """One single engine for the whole run, and one connector after another beside it."""

    def __init__(self, run: common.Run, fleet: Fleet, options: Any) -> None:
        self.run, self.fleet, self.options = run, fleet, options
        self.clients = Clients(options.model)
        self.lengths = [int(words) for words in options.lengths.split(",")]
        self.single = serve(fleet, "single", options)
        fleet.wait_ready(self.single, START_S, run.note)

    def of(self, connector: str) -> tuple[Lengths, str]:
        """By length; and the way the bytes went."""
        with tempfile.TemporaryDirectory(prefix="torpor-bench-") as folder, Fleet(Path(folder)) as fleet:
            kept = connector in KEEP
            reader, ask = self._kept(fleet, connector) if kept else self._pair(fleet, connector)
            found = {words: self._measured(ask, words) for words in self.lengths}
            pulled = fleet.http.get(f"{reader.url}/memory").json()["connector"]
        asked = len(self.lengths) * (self.options.rounds + 1)
        if pulled["loads_done"] != asked:
            raise SystemExit(f"{connector}: {asked} requests, but {pulled['loads_done']} loads: prompts were computed")
        return found, str(pulled["path"]).partition(" (")[0]

    def _measured(self, ask: Callable[[int], float], words: int) -> dict[str, common.Samples]:
        cases: dict[str, Callable[[], float]] = {
            "single": lambda: self.clients.first_token_s(self.single.url, words),
            "connector": lambda: ask(words),
        }
        return common.interleaved(cases, self.options.rounds)

    def _pair(self, fleet: Fleet, connector: str) -> tuple[Service, Callable[[int], float]]:
        flags = ("--enable-sleep-mode", "--kv-connector", connector.partition(":")[0], *_flags_of(connector), "--kv-role")
        prefill = serve(fleet, "P", self.options, *flags, "producer")
        decode = serve(fleet, "D", self.options, *flags, "consumer")
        for service in (prefill, decode):
            fleet.wait_ready(service, START_S, self.run.note)
        router = fleet.start("router", ["router", "--prefill", prefill.url, "--decode", decode.url])
        fleet.wait_ready(router, START_S, self.run.note)
        return decode, lambda words: self.clients.first_token_s(router.url, words)

    def _kept(self, fleet: Fleet, connector: str) -> tuple[Service, Callable[[int], float]]:
        service = serve(fleet, connector, self.options, "--enable-sleep-mode", "--kv-connector", connector)
        fleet.wait_ready(service, START_S, self.run.note)

        def ask(words: int) -> float:
            number = self.clients.number()
            self.clients.first_token_s(service.url, words, number)
            for path in ("sleep?level=1&mode=wait", "wake_up"):
                fleet.http.post(f"{service.url}/{path}").raise_for_status()
            return self.clients.first_token_s(service.url, words, number)

        return service, ask


def _flags_of(connector: str) -> list[str]:
    name, _, text = connector.partition(":")
    if name == "multi":
        return ["--kv-option", "connectors=ipc,offload"]
    if text == "pd":
        return ["--kv-option", f"pd_peer={free_peer()}"]
    return [part for option in text.split(";") if option for part in ("--kv-option", option)]


def over(found: dict[str, common.Samples]) -> float:
    return found["connector"].median / found["single"].median


def show(bench: Bench, results: dict[str, Lengths]) -> None:
    for words in bench.lengths:
        reference = over(results["ipc"][words]) if "ipc" in results else None
        rows = []
        for name, lengths in results.items():
            found = lengths[words]
            milliseconds = (common.Samples(tuple(1e3 * v for v in found[case].values)) for case in ("single", "connector"))
            to_ipc = "" if reference is None else f"{over(found) / reference:.2f}"
            rows.append([name, *milliseconds, f"{over(found):.2f}", to_ipc])
        title = f"ms to the first token of a prompt of {words} words"
        bench.run.table(title, ["", "single engine", "with it", "to single", "to ipc"], rows)


def main() -> None:
    options = common.arguments(
        __doc__,
        model="builtin:smollm2-135m",
        connectors="ipc,nixl,mooncake,multi,lmcache:pd,offload,lmcache",
        lengths="440,1000",  # words; about as many tokens and a tenth more
        rounds=3,
        threads=1,
        kv_cache_bytes="256MiB",
    )
    if options.quick:
        options.lengths, options.rounds, options.kv_cache_bytes = "30", 1, "4MiB"
        if options.connectors.count(","):
            options.connectors = "ipc,offload"
    run = common.Run("pd_first_token", "time to the first token: KV from elsewhere against a single engine", options.out)
    connectors = list(installed(run, options.connectors.split(",")))
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as folder, Fleet(Path(folder)) as fleet:
        bench = Bench(run, fleet, options)
        measured = {connector: bench.of(connector) for connector in connectors}
    show(bench, {name: found for name, (found, _) in measured.items()})
    tokens = bench.clients.prompt_tokens
    results = {
        name: {
            "path": path,
            "lengths": {str(tokens[words]): {**one, "over_single": over(one)} for words, one in found.items()},
        }
        for name, (found, path) in measured.items()
    }
    run.write({"threads": options.threads, **results})


if __name__ == "__main__":
    main()
