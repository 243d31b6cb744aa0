"""What a sleep and a wake pay a connector, per GiB of KV cache, and how fast it brings blocks to an engine: all side by side.

    .venv/bin/python benchmarks/connectors.py                              # every connector that is installed, under two minutes
    .venv/bin/python benchmarks/connectors.py --connectors ipc,nixl:ucx_tls=rc_v   # on a machine with RDMA

Stand-in engines of one process on the host driver: an owner and a reader that has read from it, so a release includes the
withdrawal; one that keeps KV for itself is both. ``release`` and ``restore`` are the connector's own part of the sleep and the
wake. What grows with the cache is the slope of a line through its sizes. A load counts from asking until the bytes are known to
be right; that of ``lmcache:pd`` from the end of the prefill, which pushes. In every round each connector has its turn; ratios
are to ``ipc`` in the same rounds. Time to the first token is `pd_first_token.py`.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

from torpor.connectors import ConnectorConfig
from torpor.connectors.config import KVRole
from torpor.demo.fleet import free_ports
from torpor.kvcache.types import KVCacheSpec
from torpor.memory import MemoryConfig
from torpor.testing.kv_engine import KVEngine, missing_package

GIB = 1 << 30
MIB = 1 << 20
BLOCK_SIZE = 16
BLOCKS = 64  # 16 MiB are handed off
PROMPT = list(range(BLOCKS * BLOCK_SIZE + 1))  # and the token that is computed
LOAD_S = 60.0
REFERENCE = "ipc"
ALL = "ipc,nixl,nixl:ucx_tls=tcp,mooncake,multi,lmcache:pd,offload,lmcache"


def spec_of(nbytes: int) -> KVCacheSpec:
    """Blocks of 256 KiB over all layers, as a model of 8 layers with 4 heads of 64 in float32 has them."""
    per_block = 2 * 8 * BLOCK_SIZE * 4 * 64 * 4
    return KVCacheSpec(
        model_id="stand-in@1",
        num_layers=8,
        num_blocks=nbytes // per_block,
        block_size=BLOCK_SIZE,
        num_kv_heads=4,
        head_dim=64,
        dtype="float32",
    )


def options_of(connector: str, folder: str) -> tuple[str, dict[str, Any]]:
    """The connector's name and its options: those after the colon, and what makes it work here."""
    name, _, text = connector.partition(":")
    extra: dict[str, Any] = dict(option.split("=", 1) for option in text.split(";") if "=" in option)
    sockets = {"socket_dir": str(Path(folder) / secrets.token_hex(4))}
    if name == "ipc":
        extra |= sockets
    elif name == "multi":
        extra["connectors"] = [{"kv_connector": "ipc", "kv_connector_extra_config": sockets}, "offload"]
    elif text == "pd":
        extra["pd_peer"] = free_peer()
    return name, extra


def free_peer() -> str:
    return ":".join(["127.0.0.1", *map(str, free_ports(2))])


class Pair:
    """An owner with a cache of ``nbytes``, every page of it there, and a reader with a small one."""

    def __init__(self, connector: str, nbytes: int, folder: str, stack: contextlib.ExitStack) -> None:
        name, extra = options_of(connector, folder)
        memory = MemoryConfig(driver="host")

        def engine(role: KVRole, size: int) -> KVEngine:
            config = ConnectorConfig(connector=name, role=role, engine_id=secrets.token_hex(4), extra=extra)
            return stack.enter_context(KVEngine(config, spec_of(size), memory=memory))

        alone = name in ("offload", "lmcache") and "pd_peer" not in extra
        self.pushes = "pd_peer" in extra
        if alone:
            self.owner = self.reader = engine("both", nbytes)
        else:
            self.reader = engine("consumer", 64 * MIB)
            self.owner = engine("producer", nbytes)
        for tensor in self.owner.kv_caches.values():
            tensor.zero_()

    def cycle(self, number: int) -> dict[str, float]:
        """One load, one sleep, one wake of the owner."""
        took = self._load_s(number)
        slept = self.owner.sleep()
        if slept.held_bytes:
            raise SystemExit(f"{slept.held_bytes} bytes did not come back")
        woken = self.owner.wake()
        return {
            "release_s": slept.hooks_s["connector"],
            "restore_s": woken.hooks_s["connector"],
            "load_gb_per_s": BLOCKS * 2 * self.owner.spec.num_layers * self.owner.spec.block_bytes / took / 1e9,
        }

    def _load_s(self, number: int) -> float:
        prompt, blocks, name = [number, *PROMPT[1:]], list(range(BLOCKS)), str(number)
        there = [*blocks, BLOCKS] if self.owner.kind.finds_by == "params" else blocks
        began = time.perf_counter()
        params = self.owner.hand_off(f"r{name}", prompt, there)
        if not self.pushes:
            if self.owner is self.reader:
                self.owner.wait(f"r{name}", LOAD_S)
            began = time.perf_counter()
        if self.reader.load(f"q{name}", prompt, params, [BLOCKS + b for b in blocks], LOAD_S) != "recving":
            raise SystemExit("a load has failed")
        took = time.perf_counter() - began
        if self.owner is not self.reader and self.owner.kept:
            self.owner.wait(f"r{name}", LOAD_S)
        return took


Found = dict[str, dict[str, common.Samples]]


def measure(connectors: list[str], nbytes: int, rounds: int) -> tuple[Found, dict[str, str]]:
    """By connector; and the way the bytes went. The first round connects and does not count."""
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as folder, contextlib.ExitStack() as stack:
        pairs = {connector: Pair(connector, nbytes, folder, stack) for connector in connectors}
        cycles = [{name: pair.cycle(number) for name, pair in pairs.items()} for number in range(rounds + 1)][1:]
        paths = {name: pair.reader.worker.stats().path.partition(":")[0] for name, pair in pairs.items()}
    keys = ("release_s", "restore_s", "load_gb_per_s")
    found = {name: {key: common.Samples(tuple(one[name][key] for one in cycles)) for key in keys} for name in connectors}
    return found, paths


def summary(found: dict[int, Found], name: str) -> dict[str, Any]:
    largest = found[max(found)]
    result: dict[str, Any] = {"load_gb_per_s": largest[name]["load_gb_per_s"]}
    for key in ("release_s", "restore_s"):
        points = [(nbytes / GIB, samples[name][key].median) for nbytes, samples in found.items()]
        result[key] = largest[name][key]
        result[f"{key.removesuffix('_s')}_per_gib_s"] = max(0.0, common.slope(points))
    if REFERENCE in largest:
        ours, theirs = largest[name]["load_gb_per_s"].values, largest[REFERENCE]["load_gb_per_s"].values
        result["load_over_ipc"] = common.Samples(tuple(a / b for a, b in zip(ours, theirs, strict=True)))
    return result


def installed(run: common.Run, connectors: list[str]) -> Iterator[str]:
    for connector in connectors:
        missing = missing_package(connector.partition(":")[0])
        if connector == "lmcache:pd":
            missing = missing or missing_package("nixl")
        if missing:
            run.note(f"{connector} is left out: {missing}")
        else:
            yield connector


def main() -> None:
    options = common.arguments(__doc__, connectors=ALL, sizes="128,256,512", rounds=5)
    if options.quick:
        options.connectors, options.sizes, options.rounds = "ipc,multi,offload", "48,64", 1
    run = common.Run("connectors", "KV connectors: release, restore and loads", options.out)
    sizes = [int(size) * MIB for size in options.sizes.split(",")]
    connectors = list(installed(run, options.connectors.split(",")))
    measured = {nbytes: measure(connectors, nbytes, options.rounds) for nbytes in sizes}
    found = {nbytes: samples for nbytes, (samples, _) in measured.items()}
    paths = measured[max(sizes)][1]
    results = {name: {**summary(found, name), "path": paths[name]} for name in connectors}
    rows = [
        [
            name,
            common.scaled(one["release_s"], 1e3),
            1e3 * one["release_per_gib_s"],
            common.scaled(one["restore_s"], 1e3),
            1e3 * one["restore_per_gib_s"],
            common.scaled(one["load_gb_per_s"], 1e3),
            one.get("load_over_ipc", ""),
        ]
        for name, one in results.items()
    ]
    columns = ["", "release ms", "more per GiB", "restore ms", "more per GiB ", "load MB/s", "to ipc's"]
    run.table("release and restore, loads of 16 MiB", columns, rows)
    run.write({"largest_bytes": max(sizes), **results})


if __name__ == "__main__":
    main()
