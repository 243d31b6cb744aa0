"""Sleep and wake of torpor.memory on the host driver against a plain multi-threaded memcpy of the same bytes.

    .venv/bin/python benchmarks/host_sleep.py              # the whole table, under four minutes, 17 GiB of memory
    .venv/bin/python benchmarks/host_sleep.py --sizes 1    # one size

Side by side, in one process, with the same number of threads, on the same source tensor:

    first sleep      no image yet     against  memcpy into fresh memory   both get their pages from the kernel
    prepared sleep   image memory is  against  memcpy into warm memory    after Memory.prepare_images()
    copying sleep    all has changed  against  memcpy into warm memory
    clean sleep      nothing changed  against  the copying sleep
    wake             restores all     against  memcpy into fresh memory

A memcpy is the fastest of three: the native copy engine, torch, and numpy on threads. Fresh memory is asked for in huge pages;
what it costs in 4 KiB pages is shown beside it. Fresh is from the kernel, not from a virtual machine's host (see ``prime``). A
sleep does more than a memcpy: it hashes what it copies, proves the copy and gives the pages back; a wake proves what arrived.
All of that is in the times.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import common
import numpy as np
import torch

from torpor.memory import Memory, MemoryConfig

GIB = 1 << 30
HUGE = 2 << 20
CASES = ("first sleep", "prepared sleep", "copying sleep", "clean sleep", "wake")
BASELINES = {"first sleep": "fresh", "prepared sleep": "warm", "copying sleep": "warm", "wake": "fresh"}
GOAL_OF_MEMCPY, GOAL_CLEAN = 0.8, 10.0


@dataclass
class Results:
    """Of one size: seconds of every round by case, and the phases of every sleep and wake."""

    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def add(self, case: str, seconds: float, phases: dict[str, float] | None = None) -> None:
        self.seconds.setdefault(case, []).append(seconds)
        if phases is not None:
            self.phases.setdefault(case, []).append({**phases, "other": seconds - sum(phases.values())})

    def of(self, case: str) -> common.Samples:
        return common.Samples(tuple(self.seconds[case]))

    def median(self, case: str) -> float:
        return self.of(case).median

    def rate(self, case: str) -> float:
        """GB/s."""
        return self.nbytes / self.median(case) / 1e9

    def memcpy(self, target: str) -> str:
        """The fastest way of copying into ``fresh`` or ``warm`` memory."""
        return min((c for c in self.seconds if c.startswith(f"memcpy {target} ")), key=self.median)

    def of_memcpy(self, case: str) -> float:
        return self.median(self.memcpy(BASELINES[case])) / self.median(case)

    def of_small_pages(self, case: str) -> float:
        """Of a memcpy into fresh memory as malloc gives it."""
        return self.median("memcpy into 4 KiB pages") / self.median(case)

    @property
    def clean_over_copying(self) -> float:
        return self.median("copying sleep") / self.median("clean sleep")

    @property
    def clean_over_first(self) -> float:
        return self.median("first sleep") / self.median("clean sleep")


# ---- memcpy ----------------------------------------------------------------------------------------------------------------


def fresh(nbytes: int, huge: bool = True) -> np.ndarray[Any, Any]:
    """Anonymous memory that no page was given to yet; it goes with the array."""
    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE
    return whole[start : start + nbytes]


class Memcpy:
    """Three ways of copying a tensor into an array, on so many threads."""

    def __init__(self, memory: Memory, source: torch.Tensor, threads: int) -> None:
        self._memory, self._source, self._threads = memory, source, threads
        self.ways: dict[str, Callable[[np.ndarray[Any, Any]], None]] = {
            "native": self._native,
            "torch": self._torch,
            "numpy": self._numpy,
        }

    def _native(self, target: np.ndarray[Any, Any]) -> None:
        self._memory.device.copy("to_host", [(target.ctypes.data, self._source.data_ptr(), target.nbytes)], self._threads)

    def _torch(self, target: np.ndarray[Any, Any]) -> None:
        torch.from_numpy(target).copy_(self._source)

    def _numpy(self, target: np.ndarray[Any, Any]) -> None:
        source = self._source.numpy()
        piece = -(-target.nbytes // self._threads)
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(lambda at: np.copyto(target[at : at + piece], source[at : at + piece]), range(0, target.nbytes, piece)))

    def measure(self, results: Results) -> None:
        """Every way into fresh memory, and then into the same memory, warm."""
        for name, copy in self.ways.items():
            for state, seconds in _fresh_then_warm(copy, results.nbytes, huge=True).items():
                results.add(f"memcpy {state} {name}", seconds)
        results.add("memcpy into 4 KiB pages", _fresh_then_warm(self._native, results.nbytes, huge=False)["fresh"])


def _fresh_then_warm(copy: Callable[[np.ndarray[Any, Any]], None], nbytes: int, huge: bool) -> dict[str, float]:
    prime(nbytes)
    target = fresh(nbytes, huge)
    return {state: common.timed(lambda: copy(target)) for state in ("fresh", "warm")}


# ---- sleep and wake --------------------------------------------------------------------------------------------------------


def fill(tensor: torch.Tensor) -> None:
    """Random bytes, no two chunks alike."""
    block = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8))
    for number, at in enumerate(range(0, tensor.numel(), block.numel())):
        piece = tensor[at : at + block.numel()]
        piece.copy_(block[: piece.numel()])
        piece[::HUGE] ^= number % 255 + 1


def sleep_and_wake(memory: Memory, results: Results, case: str) -> None:
    report = memory.sleep({"weights": "host"})
    results.add(case, report.seconds, report.phases_s)
    if report.returned_bytes != results.nbytes:
        raise SystemExit(f"{case}: only {report.returned_bytes} of {results.nbytes} bytes were given back: {report.tags}")
    wake = memory.wake()
    results.add("wake", wake.seconds, wake.phases_s)


def one_round(memory: Memory, tensor: torch.Tensor, memcpy: Memcpy, results: Results) -> None:
    memory.release_images("weights")
    memcpy.measure(results)
    prime(results.nbytes)
    sleep_and_wake(memory, results, "first sleep")
    tensor[::HUGE] += 1  # a byte of every chunk
    sleep_and_wake(memory, results, "copying sleep")
    sleep_and_wake(memory, results, "clean sleep")
    memory.release_images("weights")
    prime(results.nbytes)
    results.add("prepare images", common.timed(lambda: memory.prepare_images({"weights": "host"}) and None))
    sleep_and_wake(memory, results, "prepared sleep")


def discards(memory: Memory, results: Results, rounds: int) -> None:
    """What a KV cache does: no bytes are kept. Exportable memory is memory files, which come in 4 KiB pages here."""
    for tag, exportable in (("kv", False), ("kv, exportable", True)):
        tensor = memory.pool(tag, policy="discard", exportable=exportable).empty((results.nbytes,), dtype=torch.uint8)
        for _ in range(rounds):
            tensor.zero_()
            results.add(f"discard {tag}", memory.sleep({tag: "discard"}).seconds)
            results.add(f"wake {tag}", memory.wake([tag]).seconds)
            memory.mark_valid(tag)
        del tensor


def measure(nbytes: int, threads: int, rounds: int) -> Results:
    results = Results(nbytes)
    with Memory(MemoryConfig(driver="host", copy_threads=threads)) as memory:
        tensor = memory.pool("weights").empty((nbytes,), dtype=torch.uint8)
        fill(tensor)
        expected = tensor[::4096].clone()
        memcpy = Memcpy(memory, tensor, threads)
        for _ in range(rounds):
            one_round(memory, tensor, memcpy, results)
            expected[:: HUGE // 4096] += 1
            if not torch.equal(tensor[::4096], expected):
                raise SystemExit("what woke is not what was put to sleep")
        if nbytes <= GIB:
            discards(memory, results, rounds)
        del tensor, memcpy
    return results


def prime(nbytes: int) -> None:
    """A virtual machine's host takes back memory that was free for two seconds, and gives it again at ten times the kernel's
    price. So as much as comes next is taken and freed just before: everybody pays the kernel, nobody the host."""
    fresh(nbytes)[::4096] = 1


# ---- what is shown ---------------------------------------------------------------------------------------------------------


def show(run: common.Run, all_results: list[Results], reference: Results) -> None:
    for results in all_results:
        rows = [_row(results, case) for case in [*CASES, *_others(results)] if case in results.seconds]
        title = f"{results.nbytes / GIB:g} GiB, {len(results.seconds['first sleep'])} rounds, median (lowest-highest)"
        run.table(title, ["", "ms", "GB/s", "against", "part of it"], rows)
    names = list(dict.fromkeys(name for case in CASES for one in reference.phases.get(case, []) for name in one))
    rows = []
    for case in (c for c in CASES if c in reference.phases):
        phases = common.medians(reference.phases[case])
        rows.append([case, *(1e3 * phases[name] if name in phases else "" for name in names)])
    run.table(f"phases at {reference.nbytes / GIB:g} GiB, ms", ["", *names], rows)
    if len(all_results) > 1:
        cases = [c for c in CASES if c in reference.seconds]
        rows = [[case, *(1e3 * r.median(case) for r in all_results), 1e3 * growth(all_results, case)] for case in cases]
        sizes = [f"{r.nbytes / GIB:g} GiB" for r in all_results]
        run.table("growth, ms", ["", *sizes, "ms per GiB (slope)"], rows)


def _others(results: Results) -> list[str]:
    return [case for case in results.seconds if case not in CASES]


def _row(results: Results, case: str) -> list[Any]:
    milliseconds = common.Samples(tuple(1e3 * s for s in results.seconds[case]))
    if case in BASELINES:
        return [case, milliseconds, results.rate(case), results.memcpy(BASELINES[case]), f"{results.of_memcpy(case):.2f}"]
    if case == "clean sleep":
        return [case, milliseconds, results.rate(case), "copying sleep", f"{results.clean_over_copying:.1f} times as fast"]
    return [case, milliseconds, results.rate(case), "", ""]


def growth(all_results: list[Results], case: str) -> float:
    return common.slope([(r.nbytes / GIB, r.median(case)) for r in all_results])


def as_json(results: Results) -> dict[str, Any]:
    return {
        "gib": results.nbytes / GIB,
        "seconds": {case: results.of(case) for case in results.seconds},
        "gb_per_s": {case: results.rate(case) for case in results.seconds},
        "part_of_memcpy": {case: results.of_memcpy(case) for case in BASELINES if case in results.seconds},
        "part_of_memcpy_into_4_kib_pages": {case: results.of_small_pages(case) for case in ("first sleep", "wake")},
        "clean_times_faster_than": {"copying sleep": results.clean_over_copying, "first sleep": results.clean_over_first},
        "phases_s": {case: common.medians(phases) for case, phases in results.phases.items()},
    }


def goals(reference: Results) -> dict[str, bool]:
    size = f"{reference.nbytes / GIB:g} GiB"
    reached = {
        f"{case} at {size}: {reference.of_memcpy(case):.2f} of memcpy into {target} memory, goal {GOAL_OF_MEMCPY}": (
            reference.of_memcpy(case) >= GOAL_OF_MEMCPY
        )
        for case, target in BASELINES.items()
        if case in reference.seconds
    }
    for case in ("first sleep", "wake"):
        part = reference.of_small_pages(case)
        reached[f"{case} at {size}: {part:.2f} of memcpy into fresh memory in 4 KiB pages, goal {GOAL_OF_MEMCPY}"] = (
            part >= GOAL_OF_MEMCPY
        )
    for other, times in (("copying", reference.clean_over_copying), ("first", reference.clean_over_first)):
        reached[f"clean sleep at {size}: {times:.1f} times as fast as the {other} sleep, goal {GOAL_CLEAN:g}"] = (
            times >= GOAL_CLEAN
        )
    return reached


def main() -> None:
    options = common.arguments(__doc__, sizes="0.5,1,2,4,8", rounds=4, threads=len(os.sched_getaffinity(0)), reference=4.0)
    if options.quick:
        options.sizes, options.rounds = "0.5", 1
    torch.set_num_threads(options.threads)
    run = common.Run("host_sleep", f"host driver: sleep and wake against memcpy, {options.threads} threads each", options.out)
    sizes = sorted(int(float(size) * GIB) for size in options.sizes.split(","))
    prime(2 * sizes[-1])
    all_results = [measure(n, options.threads, rounds_of(n, options.rounds)) for n in sizes]
    reference = min(all_results, key=lambda r: abs(r.nbytes - options.reference * GIB))
    show(run, all_results, reference)
    slopes = {case: growth(all_results, case) for case in CASES if case in reference.seconds} if len(sizes) > 1 else {}
    results = {"threads": options.threads, "sizes": [as_json(r) for r in all_results], "slope_s_per_gib": slopes}
    run.write(results, goals(reference))


def rounds_of(nbytes: int, rounds: int) -> int:
    """The largest sizes take the longest and vary the least."""
    return rounds if nbytes < 4 * GIB else max(1, rounds * 3 // 4) if nbytes < 8 * GIB else max(1, rounds // 4)


if __name__ == "__main__":
    main()
