"""Sleep and wake of torpor.memory on a GPU against the link, in one run. Other sleepers: gpu_peers.py.

    python benchmarks/gpu_sleep.py                  # everything: 16 GiB of weights and 32 of KV cache, growth, blocks
    python benchmarks/gpu_sleep.py --parts main     # without growth and blocks

The link is one large copy of the weights' bytes between the device and their page-locked image, the best of one, two and four
streams. Weights go to the host, the KV cache is discarded:

    first sleep      the image was made at load (``Memory.prepare_images(fill=True)``)
    clean sleep      nothing has changed since: hashed, not copied
    changed sleep    a byte of every chunk has changed: all is hashed, copied, and checked in host memory
    wake             everything is mapped, the weights are copied back, what arrived is hashed
    at once          wakes that follow their sleep within milliseconds: the device still clears what was given back
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import common
import machine
import numpy as np
import torch

from torpor.memory import Memory, MemoryConfig

GIB, MIB = 1 << 30, 1 << 20
PAUSE_S = 1.0
"""Between a sleep and the wake after it: what was released has been cleared by then, as it has in life."""
STREAMS = (1, 2, 4)
GOALS = {"first sleep": 0.10, "clean sleep": 0.07}
GOALS_OF_LINK = {
    "changed sleep": ("link to host", 1.15),
    "wake": ("link to device", 1.12),
    "wake at once": ("link to device", 1.12),
}
GOAL_ARENA_S = 3.5


@dataclass
class Results:
    """Seconds of every round, by case, and the phases of sleeps and wakes."""

    weights_bytes: int
    kv_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def add(self, case: str, seconds: float, phases: dict[str, float] | None = None) -> None:
        self.seconds.setdefault(case, []).append(seconds)
        if phases is not None:
            self.phases.setdefault(case, []).append(phases)

    def of(self, case: str) -> common.Samples:
        return common.Samples(tuple(self.seconds[case]))

    def median(self, case: str) -> float:
        return self.of(case).median

    def link(self, direction: str) -> float:
        return min(self.median(case) for case in self.seconds if case.startswith(f"link {direction}"))

    def of_link(self, case: str) -> float:
        return self.median(case) / self.link(GOALS_OF_LINK[case][0].removeprefix("link "))

    def as_json(self) -> dict[str, Any]:
        return {
            "weights_gib": self.weights_bytes / GIB,
            "kv_gib": self.kv_bytes / GIB,
            "seconds": {case: self.of(case) for case in self.seconds},
            "link_gb_per_s": {d: self.weights_bytes / self.link(d) / 1e9 for d in ("to host", "to device")},
            "times_the_link": {case: self.of_link(case) for case in GOALS_OF_LINK if case in self.seconds},
            "phases_s": {case: common.medians(phases) for case, phases in self.phases.items()},
        }


class Scene:
    """Weights and a KV cache in their pools, each one tensor."""

    def __init__(self, memory: Memory, weights_bytes: int, kv_bytes: int) -> None:
        self.memory = memory
        self.weights = memory.pool("weights").empty(weights_bytes, torch.uint8)
        self.kv = memory.pool("kv_cache", policy="discard").empty(kv_bytes, torch.uint8)
        self.results = Results(weights_bytes, kv_bytes)
        fill(self.weights)

    def sleep(self, case: str) -> None:
        torch.cuda.synchronize()
        self.expected = self._hashes()
        began = time.perf_counter()
        report = self.memory.sleep()
        self.results.add(case, time.perf_counter() - began, report.phases_s)
        if report.held_bytes:
            raise SystemExit(f"{case}: {report.held_bytes} bytes are held: {report.tags}")

    def wake(self, case: str) -> None:
        began = time.perf_counter()
        report = self.memory.wake()
        self.results.add(case, time.perf_counter() - began, report.phases_s)
        self.memory.mark_valid("kv_cache")
        if not (self._hashes() == self.expected).all():
            raise SystemExit("what woke is not what was put to sleep")

    def change(self) -> None:
        self.weights[:: self.memory.config.chunk_bytes] += 1

    def link(self) -> None:
        """Between the weights and their image, whose bytes are the same."""
        [segment] = self.memory.pool("weights").segments
        assert segment.image is not None
        image = self.memory._shared.backing.address_of(segment.image)
        for streams in STREAMS:
            for kind, dst, src in (("to_device", segment.address, image), ("to_host", image, segment.address)):
                seconds = common.timed(lambda: self.memory.device.copy(kind, [(dst, src, self.weights.nbytes)], streams))  # noqa: B023
                self.results.add(f"link {kind.replace('_', ' ')}, {streams} streams", seconds)

    def prepare(self, fill: bool) -> float:
        began = time.perf_counter()
        self.memory.prepare_images(fill=fill)
        return time.perf_counter() - began

    def hash_only(self) -> None:
        self._hashes()

    def _hashes(self) -> np.ndarray[Any, Any]:
        return self.memory.device.hash_chunks(self.weights.data_ptr(), self.weights.nbytes, self.memory.config.chunk_bytes)


def fill(tensor: torch.Tensor) -> None:
    """Random bytes, no two chunks alike."""
    words = tensor.view(torch.int64)
    for at in range(0, words.numel(), 128 * MIB):
        piece = words[at : at + 128 * MIB]
        torch.randint(-(1 << 62), 1 << 62, piece.shape, out=piece, device=piece.device)
    torch.cuda.synchronize()


# ---- what is measured ------------------------------------------------------------------------------------------------------


def measure(weights_bytes: int, kv_bytes: int, rounds: int) -> Results:
    with Memory(MemoryConfig(driver="cuda")) as memory:
        scene = Scene(memory, weights_bytes, kv_bytes)
        results = scene.results
        memory.device.hash_path()  # compiled before anything is timed
        results.add("arena", scene.prepare(fill=False))
        results.add("fill images", scene.prepare(fill=True))
        scene.sleep("first sleep")
        time.sleep(PAUSE_S)
        scene.wake("wake")
        for _ in range(rounds):
            one_round(scene)
        memory.release_images("weights")
        scene.sleep("first sleep without an image")
        scene.wake("wake at once")
        for _ in range(rounds):
            results.add("hash on the device", common.timed(scene.hash_only))
        scene.weights = scene.kv = torch.empty(0)
        gc.collect()
    return results


def one_round(scene: Scene) -> None:
    scene.link()
    scene.sleep("clean sleep")
    time.sleep(PAUSE_S)
    scene.wake("wake")
    scene.change()
    scene.sleep("changed sleep")
    scene.wake("wake at once")


def blocks(rounds: int) -> dict[str, common.Samples]:
    """GB/s of random blocks copied within the device: what is read, not what is read and written."""
    with Memory(MemoryConfig(driver="cuda")) as memory:
        both = memory.pool("kv_cache").empty(8 * GIB, torch.uint8)
        half, device = both.nbytes // 2, memory.device
        dst, src = both.data_ptr(), both.data_ptr() + half
        generator = np.random.default_rng(1)
        cases: dict[str, Callable[[], float]] = {}
        for size in (4 << 10, 16 << 10, 64 << 10, MIB):
            to, source = (generator.permutation(half // size).astype(np.uint64) for _ in range(2))

            def copy(size: int = size, to: Any = to, source: Any = source) -> float:
                began = time.perf_counter()
                device.copy_blocks(dst, src, size, to, source)
                return half / (time.perf_counter() - began) / 1e9

            cases[f"blocks of {size >> 10} KiB"] = copy

        def plain() -> float:
            began = time.perf_counter()
            device.copy("device", [(dst, src, half)])
            return half / (time.perf_counter() - began) / 1e9

        found = common.interleaved({**cases, "one memcpy": plain}, rounds)
        del both
    return found


# ---- what is shown ---------------------------------------------------------------------------------------------------------


def show(run: common.Run, results: Results) -> None:
    rows = []
    for case in results.seconds:
        times = f"{results.of_link(case):.2f}" if case in GOALS_OF_LINK else ""
        rows.append([case, common.Samples(tuple(1e3 * s for s in results.seconds[case])), times])
    title = f"{results.weights_bytes / GIB:g} GiB of weights, {results.kv_bytes / GIB:g} GiB of KV cache; median (lowest-highest)"
    run.table(title, ["", "ms", "times the link"], rows)
    names = list(dict.fromkeys(name for phases in results.phases.values() for one in phases for name in one))
    rows = []
    for case, phases in results.phases.items():
        medians = common.medians(phases)
        rows.append([case, *(1e3 * medians[name] if name in medians else "" for name in names)])
    run.table("phases, ms", ["", *names], rows)


def show_growth(run: common.Run, all_results: list[Results]) -> dict[str, float]:
    cases = ("first sleep", "clean sleep", "changed sleep", "wake", "wake at once")
    points = {case: [(r.weights_bytes / GIB, r.median(case)) for r in all_results] for case in cases}
    slopes = {case: common.slope(points[case]) for case in cases}
    columns = ["", *(f"{r.weights_bytes / GIB:g} GiB" for r in all_results), "ms per GiB (slope)"]
    run.table("growth, ms", columns, [[case, *(1e3 * y for _, y in points[case]), 1e3 * slopes[case]] for case in cases])
    return slopes


def goals(results: Results) -> list[common.Goal]:
    def under(what: str, value: float, goal: float) -> common.Goal:
        return common.Goal(what=what, measured=f"{value:.3f} s", needed=f"at most {goal:g} s", reached=value <= goal)

    reached = [under(case, results.median(case), goal) for case, goal in GOALS.items()]
    for case, (link, goal) in GOALS_OF_LINK.items():
        times = results.of_link(case)
        measured, needed = f"{times:.3f} times the {link}", f"at most {goal:g}"
        reached.append(common.Goal(what=case, measured=measured, needed=needed, reached=times <= goal))
    return [*reached, under("image memory ready", results.median("arena"), GOAL_ARENA_S)]


def main() -> None:
    weights_gib, kv_gib = machine.weights_and_kv_gib()
    growth = ",".join(f"{gib:g}" for gib in machine.growth_gib())
    options = common.arguments(__doc__, weights=weights_gib, kv=kv_gib, rounds=5, sizes=growth, parts="main,blocks,growth")
    if options.quick:
        options.rounds, options.parts = 2, "main,blocks"
    run = common.Run("gpu_sleep", f"sleep and wake on {torch.cuda.get_device_name()}, against the link", options.out)
    parts = options.parts.split(",")
    results = measure(int(options.weights * GIB), int(options.kv * GIB), options.rounds)
    show(run, results)
    document: dict[str, Any] = {"main": results.as_json()}
    if "blocks" in parts:
        document["blocks_gb_per_s"] = blocks(options.rounds)
        run.table("block copies on the device, GB/s", ["", "GB/s"], [[k, v] for k, v in document["blocks_gb_per_s"].items()])
    if "growth" in parts:
        sizes = [int(float(size) * GIB) for size in options.sizes.split(",") if size]
        grown = [measure(size, results.kv_bytes, max(2, options.rounds // 2)) for size in sizes]
        grown = sorted([results, *grown], key=lambda r: r.weights_bytes)
        document["growth"] = [r.as_json() for r in grown]
        document["slope_s_per_gib"] = show_growth(run, grown)
    run.write(document, goals(results))


if __name__ == "__main__":
    main()
