"""KV blocks from one engine's process to another's: whole loads, from asking until the reader knows that the bytes are right.

    .venv/bin/python benchmarks/gpu_transfer.py                         # one GPU, and a second one where there is one
    .venv/bin/python benchmarks/gpu_transfer.py --driver host --mib 64  # no GPU

A load moves blocks of a size, from random blocks of the owner's cache into random blocks of the reader's. Beside it, in the same
round: eight loads asked for at once, as when that many prompts are handed over, by the time until the last is known; and one copy
of as many bytes as a load has, in one piece: the most that the memory, or the link between two GPUs, gives. ``ipc`` always;
``nixl`` where it is installed, with the first size only and a sixteenth of the bytes: it may be a hundred times slower. What
arrived is compared to the bit.

Then ``ipc`` loads of several sizes, by phase: before the device is asked to copy, asking it, until the last copy has ended,
checking that the bytes are right, and telling the engine's thread.

GB/s are of bytes that arrive; within one GPU its memory moves twice as many.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import common
import torch

from torpor.connectors import ConnectorConfig
from torpor.kvcache.types import KVCacheSpec
from torpor.memory import MemoryConfig
from torpor.testing.kv_engine import KVEngine

BLOCK_SIZE, HEAD_DIM = 16, 128
TOKEN_BYTES = 128 << 10  # of all layers: as a model of 8 billion parameters has
WHOLE_BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
GOAL_NVLINK = 300.0  # GB/s
GOAL_OF_COPY = 0.75  # of the copy rate within one GPU, of one load
GOAL_OF_COPY_AT_ONCE = 0.9  # of several
AT_ONCE = 8
PHASE_MIB = (2, 8, 64, 512, 1024, 4096)  # a block of all layers has 2
WAIT_S = 60.0


def spec_of(block_bytes: int, cache_bytes: int) -> KVCacheSpec:
    """Blocks of 16 bf16 tokens. Fewer layers where blocks are larger: a token is as large."""
    heads = block_bytes // (BLOCK_SIZE * HEAD_DIM * 2)
    layers = max(1, WHOLE_BLOCK_BYTES // (2 * block_bytes))
    return KVCacheSpec(
        model_id="transfer@1",
        num_layers=layers,
        num_blocks=max(1, cache_bytes // (2 * layers * block_bytes)),
        block_size=BLOCK_SIZE,
        num_kv_heads=heads,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
    )


def engine_of(name: str, role: str, connector: str, spec: KVCacheSpec, memory: MemoryConfig, folder: str) -> KVEngine:
    extra: dict[str, Any] = {"socket_dir": f"{folder}/kv"} if connector == "ipc" else {}
    return KVEngine(ConnectorConfig(connector=connector, engine_id=name, role=role, extra=extra), spec, memory=memory)  # type: ignore[arg-type]


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The same bytes for the same seed on every device of a kind."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return tensor.view(torch.int16).random_(-(2**15), 2**15, generator=generator)


def own(pipe: Connection) -> None:
    """The owner's process: one engine after another, each hands off what it is asked for."""
    pipe.send("up")
    while (settings := pipe.recv()) is not None:
        with engine_of("P", "producer", *settings) as engine:
            for seed, tensor in enumerate(engine.kv_caches.values()):
                fill(tensor, seed)
            pipe.send("up")
            while (asked := pipe.recv()) is not None:
                pipe.send(engine.hand_off(*asked))
        pipe.send("down")


class Owner:
    """A process of its own, for all transfers."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=own, args=(theirs,), daemon=True)
        self._process.start()
        self._answer()

    def ask(self, what: Any) -> Any:
        self._pipe.send(what)
        return self._answer()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(WAIT_S)

    def _answer(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise SystemExit("the owner's process does not answer")
        return self._pipe.recv()


PHASES = {
    "before_us": "before",
    "asking_us": "asking",
    "copies_us": "copying",
    "checking_us": "checking",
    "telling_us": "telling",
}


@dataclass(frozen=True)
class Load:
    """When which step of one load ended, in the order of ``PHASES``; all of ``time.perf_counter()``."""

    nbytes: int
    begun: float
    ended: tuple[float, ...]

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / (self.ended[-1] - self.begun) / 1e9

    @property
    def phases_us(self) -> dict[str, float]:
        starts = (self.begun, *self.ended)
        return {name: 1e6 * (end - start) for name, start, end in zip(PHASES, starts, self.ended, strict=False)}


class Transfer:
    """An engine in the owner's process and a reader in this one."""

    def __init__(
        self, owner: Owner, connector: str, spec: KVCacheSpec, blocks: int, theirs: MemoryConfig, ours: MemoryConfig
    ) -> None:
        """``blocks``: of a load, where it is not said otherwise."""
        self.spec = spec
        self.blocks = blocks
        self.nbytes = blocks * self.whole_bytes
        self._stack = ExitStack()
        self._rng = random.Random(0)
        self._number = 0
        self._owner = owner
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="torpor-transfer-"))
        owner.ask((connector, spec, theirs, folder))
        self._stack.callback(owner.ask, None)
        self.engine = self._stack.enter_context(engine_of("D", "consumer", connector, spec, ours, folder))
        self._copy = tuple(_scratch(self.nbytes, config) for config in (theirs, ours))
        self._marks: dict[str, float] = {}
        self._watch()

    def _watch(self) -> None:
        device: Any = self.engine.memory.device
        reader: Any = self.engine.worker._reader  # type: ignore[attr-defined]
        begin, tell, now = device.begin_copy_blocks, reader._tell, time.perf_counter

        def begins(*args: Any, **kwargs: Any) -> Any:
            self._marks.setdefault("ask", now())
            copy = begin(*args, **kwargs)
            self._marks.setdefault("asked", now() if device.copies_beside else self._marks["ask"])
            close = copy.close

            def closes() -> None:
                close()
                self._marks["copied"] = now()

            copy.close = closes
            return copy

        def tells() -> None:
            self._marks["told"] = now()
            tell()

        device.begin_copy_blocks, reader._tell = begins, tells

    @property
    def whole_bytes(self) -> int:
        """Of a block of all layers."""
        return self.spec.block_bytes * 2 * self.spec.num_layers

    def rate(self) -> float:
        """GB/s of one load."""
        return self.load(self.blocks).rate

    def rate_at_once(self) -> float:
        """GB/s of several loads, into blocks of their own, until the last is known to the engine."""
        blocks = self.spec.num_blocks // AT_ONCE
        there, here = self._scattered(AT_ONCE * blocks), self._scattered(AT_ONCE * blocks)
        parts = [slice(at, at + blocks) for at in range(0, AT_ONCE * blocks, blocks)]
        asked = [self._handed_off(there[part]) for part in parts]
        begun = time.perf_counter()
        for part, (request, prompt, params) in zip(parts, asked, strict=True):
            self.engine.begin_load(request, prompt, params, here[part])
        for request, _, _ in asked:
            self._wait(request)
        took_s = time.perf_counter() - begun
        self.there, self.here = there, here
        return AT_ONCE * blocks * self.whole_bytes / took_s / 1e9

    def load(self, blocks: int) -> Load:
        """One load of so many blocks of all layers."""
        self._marks.clear()
        there, here = self._scattered(blocks), self._scattered(blocks)
        request, prompt, params = self._handed_off(there)
        begun = time.perf_counter()
        self.engine.begin_load(request, prompt, params, here)
        self._wait(request)
        known = time.perf_counter()
        self.there, self.here = there, here
        ended = (*(self._marks[mark] for mark in ("ask", "asked", "copied", "told")), known)
        return Load(blocks * self.whole_bytes, begun, ended)

    def _handed_off(self, there: list[int]) -> tuple[str, list[int], Any]:
        """The request's name here, its prompt, and what the owner's client gets."""
        self._number += 1
        prompt = [self._number, *range(len(there) * BLOCK_SIZE - 1)]
        return f"q{self._number}", prompt, self._owner.ask((f"r{self._number}", prompt, there))

    def _wait(self, request: str) -> None:
        finished = self.engine.wait(request, WAIT_S, poll_s=0.0001)
        if finished != "recving":
            raise SystemExit(f"load {request} ended as {finished}")

    def copy(self) -> float:
        """GB/s of one copy of as many bytes in one piece."""
        source, target = self._copy
        _synchronize(source, target)
        begun = time.perf_counter()
        target.copy_(source)
        _synchronize(source, target)
        return self.nbytes / (time.perf_counter() - begun) / 1e9

    def verify(self) -> bool:
        """Whether the last load's blocks are the owner's, to the bit."""
        scratch = torch.empty_like(next(iter(self.engine.kv_caches.values())))
        for seed, tensor in enumerate(self.engine.kv_caches.values()):
            fill(scratch, seed)
            ours, theirs = (t.view(torch.int16)[:, ids] for t, ids in ((tensor, self.here), (scratch, self.there)))
            if not torch.equal(ours, theirs):
                return False
        return True

    def close(self) -> None:
        self._copy = ()
        self._stack.close()

    def _scattered(self, blocks: int) -> list[int]:
        return self._rng.sample(range(self.spec.num_blocks), blocks)


def _scratch(nbytes: int, config: MemoryConfig) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{config.device}" if config.driver == "cuda" else "cpu")


def _synchronize(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def configs(args: Any, ordinals: Sequence[int]) -> list[MemoryConfig]:
    return [MemoryConfig(driver=args.driver, device=ordinal, extent_bytes=1 << 30) for ordinal in ordinals]


def measure(
    owner: Owner, connector: str, block_bytes: int, load_bytes: int, ordinals: Sequence[int], args: Any
) -> dict[str, Any]:
    spec = spec_of(block_bytes, AT_ONCE * max(load_bytes, WHOLE_BLOCK_BYTES))
    transfer = Transfer(owner, connector, spec, spec.num_blocks // AT_ONCE, *configs(args, ordinals))
    ways = {"load": transfer.rate, "at_once": transfer.rate_at_once, "copy": transfer.copy}
    try:
        found = common.interleaved(ways, args.rounds, warmup=2)
        same = transfer.verify()
        return {**found, "bytes": transfer.nbytes, "identical": same, "path": transfer.engine.worker.stats().path}
    finally:
        transfer.close()


def phases(owner: Owner, block_bytes: int, ordinals: Sequence[int], args: Any) -> dict[str, dict[str, common.Samples]]:
    """By MiB of a load: microseconds of every phase, and GB/s of the whole."""
    sizes = [mib for mib in PHASE_MIB if mib <= 4 * args.mib]
    spec = spec_of(block_bytes, sizes[-1] << 21)
    transfer = Transfer(owner, "ipc", spec, spec.num_blocks // 2, *configs(args, ordinals))
    try:
        loads = [{mib: transfer.load((mib << 20) // WHOLE_BLOCK_BYTES) for mib in sizes} for _ in range(3 * args.rounds)][2:]
    finally:
        transfer.close()
    return {
        str(mib): {
            **{name: common.Samples(tuple(one[mib].phases_us[name] for one in loads)) for name in PHASES},
            "rate": common.Samples(tuple(one[mib].rate for one in loads)),
        }
        for mib in sizes
    }


def main() -> None:
    args = common.arguments(
        __doc__, driver="cuda", mib=1024, rounds=7, sizes="16384,4096,65536,1048576", quick=False, out=str(common.MEASUREMENTS)
    )
    if args.quick:
        args.rounds, args.mib = 2, min(args.mib, 16)
    run = common.Run("gpu_transfer", "KV blocks from P's process to D's", args.out)
    gpus = torch.cuda.device_count() if args.driver == "cuda" else 0
    ways = {"one GPU" if gpus else "host": (0, 0)} | ({"two GPUs": (0, 1)} if gpus > 1 else {})
    connectors = ["ipc"] + (["nixl"] if importlib.util.find_spec("nixl_cu13") else [])
    results: dict[str, Any] = {"gpus": [torch.cuda.get_device_name(i) for i in range(gpus)]}
    goals, rows = {}, []
    owner = Owner()
    sizes = [int(size) for size in args.sizes.split(",")]
    for way, ordinals in ways.items():
        for connector in connectors:
            for block_bytes in sizes if connector == "ipc" else sizes[:1]:
                load_bytes = (args.mib << 20) // (1 if connector == "ipc" else 16)
                found = measure(owner, connector, block_bytes, load_bytes, ordinals, args)
                results.setdefault(way, {}).setdefault(connector, {})[str(block_bytes)] = found
                rates = found["load"], found["at_once"], found["copy"]
                rows.append([f"{way}, {connector}", block_bytes >> 10, *rates, str(found["identical"])])
                goals[f"{way}, {connector}, {block_bytes >> 10} KiB: to the bit"] = found["identical"]
                if args.quick:  # small loads: what they reach says nothing about large ones
                    continue
                if connector == "ipc" and way == "two GPUs":
                    goals[f"{way}, {block_bytes >> 10} KiB: {GOAL_NVLINK:.0f} GB/s"] = found["load"].median >= GOAL_NVLINK
                if connector == "ipc" and way == "one GPU":
                    of_copy = {name: found[name].median / found["copy"].median for name in ("load", "at_once")}
                    shown = f"{way}, {block_bytes >> 10} KiB"
                    goals[f"{shown}: {GOAL_OF_COPY} of the copy rate"] = of_copy["load"] >= GOAL_OF_COPY
                    goals[f"{shown}, {AT_ONCE} loads at once: {GOAL_OF_COPY_AT_ONCE} of the copy rate"] = (
                        of_copy["at_once"] >= GOAL_OF_COPY_AT_ONCE
                    )
    by_phase = {way: phases(owner, sizes[0], ordinals, args) for way, ordinals in ways.items()}
    owner.close()
    columns = ["way", "block KiB", "load", f"{AT_ONCE} loads at once", "one copy", "identical"]
    run.table("GB/s, median (lowest-highest)", columns, rows)
    run.table(
        f"microseconds of a load in blocks of {sizes[0] >> 10} KiB",
        ["way", "MiB", *PHASES.values(), "GB/s"],
        [[f"{way}, ipc", int(mib), *found.values()] for way, of_way in by_phase.items() for mib, found in of_way.items()],
    )
    results["phases"] = by_phase
    run.write(results, goals)


if __name__ == "__main__":
    main()
