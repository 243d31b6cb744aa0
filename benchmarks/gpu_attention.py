"""Attention over paged KV on a GPU: bytes a second of decoding against a device copy, flops of prefill against torch's own.

    python benchmarks/gpu_attention.py                 # Qwen3-8B's heads (32 over 8 of 128, bf16), under a minute
    python benchmarks/gpu_attention.py --sweep all     # and before that the kernels' constants: what tuning.py is made from

Decoding runs as the engine runs it: a captured step of 36 layers, each with keys and values that no cache of the device still
holds. Its bytes are the contexts' keys and values, read once. Prefill is one layer, launched as such.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import common
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from torpor.models.attention import AttentionBackend, AttentionLayer, PagedBatch
from torpor.models.attention.triton_backend import TritonBackend

HEADS, KV_HEADS, HEAD_DIM, DTYPE, LAYERS = 32, 8, 128, torch.bfloat16, 36
LAYER = AttentionLayer(scaling=HEAD_DIM**-0.5)
DECODES = tuple(itertools.product((1, 64, 256), (192, 2048, 8192)))
PREFILLS = ((1, 8192, 8192), (4, 2048, 2048), (1, 2048, 8192), (64, 128, 128))  # sequences, tokens of each, context of each
COLD_BYTES = 300 << 20  # of keys and values between two uses of the same: six times the H200's L2
STEP_MS = 22.0  # of an 8B model's step over 256 sequences


def microseconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median over ``repeats``, on the device, after two that do not count."""
    times = []
    for _ in range(2 + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def copy_rate(nbytes: int = 4 << 30) -> float:
    """Bytes a second of a device copy, read and written."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / microseconds(lambda: target.copy_(source)) * 1e6


def make_batch(sequences: int, tokens: int, context: int, block_size: int) -> PagedBatch:
    """Blocks in random order."""
    per_sequence = -(-context // block_size)
    blocks = torch.randperm(sequences * per_sequence, device="cuda").view(sequences, per_sequence)
    positions = torch.arange(context - tokens, context, device="cuda")
    slots = blocks[:, positions // block_size] * block_size + positions % block_size
    return PagedBatch(
        block_size=block_size,
        query_starts=tuple(range(0, sequences * tokens + 1, tokens)),
        seq_lens=(context,) * sequences,
        max_seq_len=40960 if tokens == 1 else context,
        num_single=sequences if tokens == 1 else 0,
        slots=slots.flatten(),
        fresh_blocks=blocks.flatten()[:0],
        block_tables=blocks,
        seq_lens_tensor=torch.full((sequences,), context, device="cuda"),
    )


def random_cache(batch: PagedBatch, kv_heads: int = KV_HEADS) -> torch.Tensor:
    shape = (2, batch.block_tables.numel(), batch.block_size, kv_heads, HEAD_DIM)
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_()


class Decode:
    """A captured step of ``LAYERS`` layers."""

    def __init__(self, sequences: int, context: int, block_size: int) -> None:
        self.batch = make_batch(sequences, 1, context, block_size)
        self.nbytes = sequences * context * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize  # of one layer
        self.caches = [random_cache(self.batch) for _ in range(min(LAYERS, max(2, -(-COLD_BYTES // self.nbytes))))]
        self.query = torch.randn(sequences, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.key = torch.randn(sequences, KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")

    def step(self, backend: AttentionBackend, write: bool = False) -> None:
        step = backend.begin(self.batch, DTYPE)
        for index in range(LAYERS):
            cache = self.caches[index % len(self.caches)]
            if write:
                step.write_kv(self.key, self.key, cache)
            else:
                step.attend(LAYER, self.query, self.key, self.key, cache)

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        return backend.begin(self.batch, DTYPE).attend(LAYER, self.query, self.key, self.key, self.caches[0])

    def layer_us(self, backend: AttentionBackend, write: bool = False) -> float:
        self.step(backend, write)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(backend, write)
        return microseconds(graph.replay) / LAYERS


class Prefill:
    def __init__(self, sequences: int, tokens: int, context: int, block_size: int) -> None:
        self.batch = make_batch(sequences, tokens, context, block_size)
        self.cache = random_cache(self.batch)
        self.query = torch.randn(sequences * tokens, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.shape = (sequences, tokens, context)
        pairs = sequences * (tokens * (context - tokens) + tokens * (tokens + 1) // 2)
        self.flops = 4 * HEADS * HEAD_DIM * pairs

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        return backend.begin(self.batch, DTYPE).attend(LAYER, self.query, self.query, self.query, self.cache)

    def us(self, backend: AttentionBackend) -> float:
        """Of one layer; what the layers of a step share is not in it."""
        step = backend.begin(self.batch, DTYPE)
        return microseconds(lambda: step.attend(LAYER, self.query, self.query, self.query, self.cache))

    def flash_us(self) -> float | None:
        """torch's flash attention over the same in one piece; None behind a prefix: its causal mask begins at the first key."""
        sequences, tokens, context = self.shape
        if tokens != context:
            return None
        query = torch.randn(sequences, HEADS, tokens, HEAD_DIM, dtype=DTYPE, device="cuda")
        key = torch.randn(sequences, KV_HEADS, tokens, HEAD_DIM, dtype=DTYPE, device="cuda")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return microseconds(lambda: scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True))


def measure_decodes(run: common.Run, block_size: int, copy: float) -> dict[str, Any]:
    rows, results = [], {}
    for sequences, context in DECODES:
        decode = Decode(sequences, context, block_size)
        us = decode.layer_us(TritonBackend())
        slow = decode.layer_us(TritonBackend(deterministic=True))
        write = decode.layer_us(TritonBackend(), write=True)
        rate = decode.nbytes / us * 1e6
        rows.append((f"{sequences} x {context}", us, rate / 1e12, rate / copy, LAYERS * us / 1e3, slow, write))
        results[f"{sequences}x{context}"] = {
            "us_per_layer": us,
            "bytes_per_s": rate,
            "of_copy": rate / copy,
            "deterministic_us_per_layer": slow,
            "write_kv_us_per_layer": write,
        }
        del decode
        torch.cuda.empty_cache()
    columns = ["decode", "us/layer", "TB/s", "of a copy", "ms/step", "deterministic us", "write_kv us"]
    run.table("Decoding, sequences x context", columns, rows)
    return results


def measure_prefills(run: common.Run, block_size: int) -> dict[str, Any]:
    rows, results = [], {}
    for sequences, tokens, context in PREFILLS:
        prefill = Prefill(sequences, tokens, context, block_size)
        us, slow, flash = prefill.us(TritonBackend()), prefill.us(TritonBackend(deterministic=True)), prefill.flash_us()
        rates = [prefill.flops / t / 1e6 if t else None for t in (us, slow, flash)]
        rows.append((f"{sequences} x {tokens} of {context}", us, *("-" if r is None else r for r in rates)))
        names = ("flops_per_s", "deterministic_flops_per_s", "flash_flops_per_s")
        results[f"{sequences}x{tokens}of{context}"] = {
            "us": us,
            **{name: rate and rate * 1e12 for name, rate in zip(names, rates, strict=True)},
        }
    run.table("Prefill, sequences x tokens", ["prefill", "us", "TFLOP/s", "deterministic", "torch's flash"], rows)
    return results


def eager_step_ms() -> float:
    """What launching a step's attention costs the processor, uncaptured."""
    decode = Decode(1, 192, 16)
    decode.step(TritonBackend())
    torch.cuda.synchronize()
    return common.timed(lambda: decode.step(TritonBackend())) * 1e3


# ---- constants -------------------------------------------------------------------------------------------------------------


SWEPT_DECODES = ((1, 192), (1, 2048), (1, 8192), (8, 1024), (64, 192), (64, 2048), (256, 192))
SWEPT_DETERMINISTIC = ((1, 192), (1, 8192), (256, 192))  # and all of PREFILLS
PREFILL_TILES = (
    (128, 64, 8, 3),  # block_m, block_n, num_warps, num_stages
    (128, 64, 8, 5),
    (128, 128, 8, 3),
    (128, 32, 8, 5),
    (64, 64, 4, 3),
    (64, 64, 4, 5),
    (64, 128, 4, 3),
    (64, 32, 4, 5),
)
KINDS = ("decode", "prefill", "deterministic")
Constants = dict[str, int]


@contextmanager
def constants(kind: str, chosen: Constants) -> Iterator[None]:
    from torpor.models.attention.triton_kernels import tuning
    from torpor.models.attention.triton_kernels.decode import DecodeTiles
    from torpor.models.attention.triton_kernels.prefill import PrefillTiles

    name, tiles = ("decode_tiles", DecodeTiles(**chosen)) if kind == "decode" else ("prefill_tiles", PrefillTiles(**chosen))
    usual = getattr(tuning, name)
    setattr(tuning, name, lambda *args, **kwargs: tiles)
    try:
        yield
    finally:
        setattr(tuning, name, usual)


def candidates(kind: str) -> list[Constants]:
    if kind == "decode":
        grid = itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 7))
        return [{"block_n": n, "num_warps": w, "num_stages": s, "waves": 16, "shortest": 256} for n, w, s in grid]
    return [{"block_m": m, "block_n": n, "num_warps": w, "num_stages": s} for m, n, w, s in PREFILL_TILES]


def compile_one(task: tuple[str, Constants, int]) -> str:
    """In a process of its own: fills Triton's cache on disk."""
    kind, chosen, block_size = task
    try:
        with constants(kind, chosen):
            if kind == "decode":
                Decode(1, 512, block_size).step(TritonBackend())
            else:
                Prefill(1, 512, 512, block_size).us(TritonBackend(deterministic=kind == "deterministic"))
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, or what else a compiler meets
        return f"{kind} {chosen}: {type(error).__name__} {str(error)[:100]}"
    return ""


def sweep(run: common.Run, kinds: Sequence[str], block_size: int) -> dict[str, Any]:
    tasks = [(kind, chosen, block_size) for kind in kinds for chosen in candidates(kind)]
    # Not forked from here: a process that has asked for the device's name has a context, which its children cannot use.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton"])
    with context.Pool(min(len(tasks), len(os.sched_getaffinity(0)))) as pool:
        faults = pool.map(compile_one, tasks, chunksize=1)
    run.note("\n".join(filter(None, faults)) or "all compile")
    if all(faults):
        raise SystemExit("nothing compiles")
    good = {kind: [c for (k, c, _), fault in zip(tasks, faults, strict=True) if k == kind and not fault] for kind in kinds}
    decodes = {f"{s} x {c}": Decode(s, c, block_size) for s, c in SWEPT_DECODES}
    few = {f"{s} x {c}": decodes[f"{s} x {c}"] for s, c in SWEPT_DETERMINISTIC}
    prefills = {f"{s} x {t} of {c}": Prefill(s, t, c, block_size) for s, t, c in PREFILLS}
    cases: dict[str, dict[str, Any]] = {"decode": decodes, "prefill": prefills, "deterministic": {**few, **prefills}}
    results = {}
    for kind in kinds:
        rows = [(chosen, swept(kind, chosen, cases[kind])) for chosen in good[kind]]
        if kind == "decode":
            best = min(rows, key=_product)[0]
            for waves, shortest in itertools.product((2, 4, 8, 16, 32), (64, 128, 256, 512)):
                chosen = {**best, "waves": waves, "shortest": max(shortest, best["block_n"])}
                rows.append((chosen, swept(kind, chosen, decodes)))
        results[kind] = _ranked(run, kind, rows)
    return results


def swept(kind: str, chosen: Constants, cases: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each case. Whoever computes something else than the constants in use is out."""
    backend = TritonBackend(deterministic=kind == "deterministic")
    expected = {name: case.attend(backend) for name, case in cases.items()}
    with constants(kind, chosen):
        for name, case in cases.items():
            error = float((case.attend(backend) - expected[name]).norm() / expected[name].norm())
            if not error < 0.01:
                raise SystemExit(f"{kind} {chosen}: {name} is off by {error}")
        return {name: case.layer_us(backend) if isinstance(case, Decode) else case.us(backend) for name, case in cases.items()}


def _product(row: tuple[Constants, dict[str, float]]) -> float:
    return math.prod(row[1].values())


def _ranked(run: common.Run, kind: str, rows: list[tuple[Constants, dict[str, float]]]) -> list[Any]:
    """By the product of the times: every case counts alike."""
    rows = sorted(rows, key=_product)
    table = [(" ".join(map(str, chosen.values())), *times.values()) for chosen, times in rows]
    run.table(f"{kind}: us per layer", [" ".join(rows[0][0]), *rows[0][1]], table)
    return [{**chosen, **times} for chosen, times in rows]


def main() -> None:
    given = common.arguments(__doc__, out=str(common.MEASUREMENTS), sweep="", block_size=16)
    run = common.Run("gpu_attention", "Attention over paged KV on a GPU", given.out)
    results: dict[str, Any] = {"block_size": given.block_size}
    if given.sweep:
        kinds = KINDS if given.sweep == "all" else given.sweep.split(",")
        results["constants"] = sweep(run, kinds, given.block_size)
    run.header["gpu"] = torch.cuda.get_device_name()
    results["copy_bytes_per_s"] = copy = copy_rate()
    run.note(f"{run.header['gpu']}: device copy {copy / 1e12:.2f} TB/s, read and written")
    results["decode"] = measure_decodes(run, given.block_size, copy)
    results["prefill"] = measure_prefills(run, given.block_size)
    results["eager_step_ms"] = eager_step_ms()
    run.note(f"launching a step of {LAYERS} layers without a graph: {results['eager_step_ms']:.2f} ms")
    at_256 = LAYERS * results["decode"]["256x192"]["us_per_layer"] / 1e3
    run.write(
        results,
        goals={
            f"256 x 192: {at_256:.2f} ms, under 15% of a step of {STEP_MS:.0f} ms": at_256 < 0.15 * STEP_MS,
            "1 x 192: at most 10 us a layer": results["decode"]["1x192"]["us_per_layer"] <= 10,
        },
    )


if __name__ == "__main__":
    main()
