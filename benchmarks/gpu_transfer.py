"""KV blocks from one engine's process to another's: whole loads, from asking until the reader knows that the bytes are right.

    .venv/bin/python benchmarks/gpu_transfer.py                         # one GPU, and a second one where there is one
    .venv/bin/python benchmarks/gpu_transfer.py --driver host --mib 64  # no GPU

A load moves blocks of a size, half of the owner's cache in random order, into random blocks of the reader's. Beside it, in the
same round, one copy of as many bytes in one piece: the most that the memory, or the link between two GPUs, gives. ``ipc`` always;
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
GOAL_NVLINK = 300.0  # GB/s
GOAL_OF_COPY = 0.75  # of the copy rate within one GPU
PHASE_MIB = (2, 8, 64, 512, 1024, 4096)  # a block of all layers has 2
WAIT_S = 60.0


def spec_of(block_bytes: int, load_bytes: int) -> KVCacheSpec:
    """Twice as many blocks as one load moves, of 16 bf16 tokens. Fewer layers where blocks are larger: a token is as large."""
    heads = block_bytes // (BLOCK_SIZE * HEAD_DIM * 2)
    layers = max(1, BLOCK_SIZE * TOKEN_BYTES // (2 * block_bytes))
    return KVCacheSpec(
        model_id="transfer@1",
        num_layers=layers,
        num_blocks=2 * max(1, load_bytes // (2 * layers * block_bytes)),
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

    def __init__(self, owner: Owner, connector: str, spec: KVCacheSpec, theirs: MemoryConfig, ours: MemoryConfig) -> None:
        self.spec = spec
        self.nbytes = spec.num_blocks // 2 * spec.block_bytes * 2 * spec.num_layers
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

    def rate(self) -> float:
        """GB/s of one load."""
        return self.load(self.spec.num_blocks // 2).rate

    def load(self, blocks: int) -> Load:
        """One load of so many blocks of all layers."""
        self._number += 1
        self._marks.clear()
        there, here = self._scattered(blocks), self._scattered(blocks)
        prompt = [self._number, *range(len(there) * BLOCK_SIZE - 1)]
        params = self._owner.ask((f"r{self._number}", prompt, there))
        request, begun = f"q{self._number}", time.perf_counter()
        self.engine.begin_load(request, prompt, params, here)
        finished = self.engine.wait(request, WAIT_S, poll_s=0.0001)
        known = time.perf_counter()
        if finished != "recving":
            raise SystemExit(f"a load of {self.nbytes} bytes ended as {finished}")
        self.there, self.here = there, here
        ended = (*(self._marks[mark] for mark in ("ask", "asked", "copied", "told")), known)
        return Load(self.nbytes * blocks // (self.spec.num_blocks // 2), begun, ended)

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
    transfer = Transfer(owner, connector, spec_of(block_bytes, load_bytes), *configs(args, ordinals))
    try:
        found = common.interleaved({"load": transfer.rate, "copy": transfer.copy}, args.rounds, warmup=2)
        same = transfer.verify()
        return {**found, "bytes": transfer.nbytes, "identical": same, "path": transfer.engine.worker.stats().path}
    finally:
        transfer.close()


def phases(owner: Owner, block_bytes: int, ordinals: Sequence[int], args: Any) -> dict[str, dict[str, common.Samples]]:
    """By MiB of a load: microseconds of every phase, and GB/s of the whole."""
    sizes = [mib for mib in PHASE_MIB if mib <= 4 * args.mib]
    transfer = Transfer(owner, "ipc", spec_of(block_bytes, sizes[-1] << 20), *configs(args, ordinals))
    try:
        whole = BLOCK_SIZE * TOKEN_BYTES
        loads = [{mib: transfer.load((mib << 20) // whole) for mib in sizes} for _ in range(3 * args.rounds)][2:]
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
                rows.append([f"{way}, {connector}", block_bytes >> 10, found["load"], found["copy"], str(found["identical"])])
                goals[f"{way}, {connector}, {block_bytes >> 10} KiB: to the bit"] = found["identical"]
                if args.quick:  # small loads: what they reach says nothing about large ones
                    continue
                if connector == "ipc" and way == "two GPUs":
                    goals[f"{way}, {block_bytes >> 10} KiB: {GOAL_NVLINK:.0f} GB/s"] = found["load"].median >= GOAL_NVLINK
                if connector == "ipc" and way == "one GPU":
                    enough = found["load"].median >= GOAL_OF_COPY * found["copy"].median
                    goals[f"{way}, {block_bytes >> 10} KiB: {GOAL_OF_COPY} of the copy rate"] = enough
    by_phase = {way: phases(owner, sizes[0], ordinals, args) for way, ordinals in ways.items()}
    owner.close()
    run.table("GB/s, median (lowest-highest)", ["way", "block KiB", "load", "one copy", "identical"], rows)
    run.table(
        f"microseconds of a load in blocks of {sizes[0] >> 10} KiB",
        ["way", "MiB", *PHASES.values(), "GB/s"],
        [[f"{way}, ipc", int(mib), *found.values()] for way, of_way in by_phase.items() for mib, found in of_way.items()],
    )
    results["phases"] = by_phase
    run.write(results, goals)


if __name__ == "__main__":
    main()
