"""What a sleep and a wake pay a connector, per GiB of KV cache, and how fast it brings blocks from one engine to another.

    .venv/bin/python benchmarks/connectors.py                              # ipc, nixl, nixl over TCP
    .venv/bin/python benchmarks/connectors.py --connectors ipc,nixl:ucx_tls=rc_v   # on a machine with RDMA

Two stand-in engines of one process on the host driver: an owner and a reader that has read from it, so a release includes the
withdrawal. ``release`` and ``restore`` are the connector's own part of the sleep and the wake. What grows with the cache is the
slope of a line through its sizes, and what does not is its value at nothing. Time to the first token is `pd_first_token.py`.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import common

from torpor.connectors import ConnectorConfig
from torpor.connectors.config import KVRole
from torpor.kvcache.types import KVCacheSpec
from torpor.memory import MemoryConfig
from torpor.testing.kv_engine import KVEngine

GIB = 1 << 30
MIB = 1 << 20
BLOCK_SIZE = 16
PROMPT = list(range(64 * BLOCK_SIZE))  # 64 blocks: 16 MiB are handed off
LOAD_S = 60.0


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


@contextlib.contextmanager
def pair(connector: str, nbytes: int) -> Iterator[tuple[KVEngine, KVEngine]]:
    """An owner with a cache of ``nbytes``, every page of it there, and a reader with a small one."""
    name, _, options = connector.partition(":")
    extra: dict[str, Any] = dict(option.split("=", 1) for option in options.split(";") if option)
    memory = MemoryConfig(driver="host")
    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as folder, contextlib.ExitStack() as stack:
        if name == "ipc":
            extra["socket_dir"] = folder

        def engine(role: KVRole, size: int) -> KVEngine:
            config = ConnectorConfig(connector=name, role=role, engine_id=secrets.token_hex(4), extra=extra)
            return stack.enter_context(KVEngine(config, spec_of(size), memory=memory))

        yield engine("producer", nbytes), engine("consumer", 64 * MIB)


def load_s(owner: KVEngine, reader: KVEngine, name: str) -> float:
    """Seconds from asking for a hand-off until its bytes are known to be right, as the connector's thread needs them."""
    blocks = list(range(len(PROMPT) // BLOCK_SIZE))
    params = owner.hand_off(f"r{name}", PROMPT, blocks)
    began = time.perf_counter()
    if reader.load(f"q{name}", PROMPT, params, blocks, LOAD_S) != "recving":
        raise SystemExit("a load has failed")
    took = time.perf_counter() - began
    owner.wait(f"r{name}", LOAD_S)
    return took


def cycle(owner: KVEngine, reader: KVEngine, name: str) -> dict[str, float]:
    """One load, one sleep, one wake of the owner."""
    seconds = load_s(owner, reader, name)
    slept = owner.sleep()
    if slept.held_bytes:
        raise SystemExit(f"{slept.held_bytes} bytes did not come back")
    woken = owner.wake()
    return {
        "release_s": slept.hooks_s["connector"],
        "restore_s": woken.hooks_s["connector"],
        "load_gb_per_s": len(PROMPT) // BLOCK_SIZE * 2 * owner.spec.num_layers * owner.spec.block_bytes / seconds / 1e9,
    }


def measure(connector: str, sizes: list[int], rounds: int) -> tuple[dict[int, dict[str, common.Samples]], str]:
    """By size; and the way the bytes went. The first cycle of each size connects and does not count."""
    found, path = {}, ""
    for nbytes in sizes:
        with pair(connector, nbytes) as (owner, reader):
            for tensor in owner.kv_caches.values():
                tensor.zero_()
            cycles = [cycle(owner, reader, str(index)) for index in range(rounds + 1)][1:]
            path = reader.worker.stats().path.partition(":")[0]
        found[nbytes] = {key: common.Samples(tuple(one[key] for one in cycles)) for key in cycles[0]}
    return found, path


def summary(found: dict[int, dict[str, common.Samples]]) -> dict[str, Any]:
    largest = found[max(found)]
    result: dict[str, Any] = {"load_gb_per_s": largest["load_gb_per_s"]}
    for key in ("release_s", "restore_s"):
        points = [(nbytes / GIB, samples[key].median) for nbytes, samples in found.items()]
        result[key] = largest[key]
        result[f"{key.removesuffix('_s')}_per_gib_s"] = max(0.0, common.slope(points))
    return result


def main() -> None:
    options = common.arguments(__doc__, connectors="ipc,nixl,nixl:ucx_tls=tcp", sizes="256,512,1024", rounds=5)
    if options.quick:
        options.connectors, options.sizes, options.rounds = "ipc", "32,64", 1
    run = common.Run("connectors", "KV connectors: release, restore and loads", options.out)
    sizes = [int(size) * MIB for size in options.sizes.split(",")]
    results = {}
    for connector in options.connectors.split(","):
        found, path = measure(connector, sizes, options.rounds)
        results[connector] = {**summary(found), "path": path}
    rows = [
        [
            name,
            common.scaled(found["release_s"], 1e3),
            1e3 * found["release_per_gib_s"],
            common.scaled(found["restore_s"], 1e3),
            1e3 * found["restore_per_gib_s"],
            found["load_gb_per_s"],
        ]
        for name, found in results.items()
    ]
    title = f"a cache of {max(sizes) / GIB:g} GiB, ms, median (lowest-highest); loads of 16 MiB"
    run.table(title, ["", "release", "more per GiB", "restore", "more per GiB ", "load GB/s"], rows)
    run.write({"largest_bytes": max(sizes), **results})


if __name__ == "__main__":
    main()
