"""In which order a wake creates memory and copies: what was tried, on one GPU, against the link.

    python benchmarks/gpu_wake_orders.py                   # 45 s, 64 GiB of one GPU, 16 GiB of host memory

16 GiB that are copied back from page-locked memory ("weights"), 32 GiB that only need memory ("cache"). Driver calls only,
through ``torpor._native``; what arrived is checked only where it says so. ``at once``: the memory was released milliseconds
before, and the device is still clearing it; ``later``: half a second before.

Before that, what the clearing does to copies alone: into memory that stayed, right after 48 GiB beside it were released.
Orders are tried in turns until ``--seconds`` are over; the table says how often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import common
import numpy as np

from torpor._native import ChunkImage, Device, Region

GIB, MIB = 1 << 30, 1 << 20
CHUNK = 2 * MIB
PIECE = 64 * MIB  # of a time line
BUCKET_S = 0.02
PAUSES = {"at once": 0.0, "later": 0.5}
SETTLE_S = 0.25  # before every round: what the last one released has been cleared
THREADS = 8


class Scene:
    def __init__(self, device: Device, image: int, weights_bytes: int, cache_bytes: int, extent_bytes: int) -> None:
        self.device, self.image = device, image
        self.weights: Region = device.create_region(weights_bytes, extent_bytes=extent_bytes, name="weights")
        self.cache: Region = device.create_region(cache_bytes, extent_bytes=extent_bytes, name="cache")

    def close(self) -> None:
        self.weights.destroy()
        self.cache.destroy()

    def copy(self) -> None:
        self.device.copy("to_device", [(self.weights.address, self.image, self.weights.nbytes)], 2)

    def copy_by_kernel(self) -> None:
        ids = np.arange(self.weights.nbytes // CHUNK, dtype=np.uint64)
        self.device.copy_blocks(self.weights.address, self.image, CHUNK, ids, ids)

    def wake(self, *regions: Region) -> None:
        """Maps them, and restores the weights beside that."""
        count = self.weights.nbytes // CHUNK
        numbers = [np.zeros(count, dtype=np.uint64) for _ in range(3)]
        image = ChunkImage(
            device_address=self.weights.address,
            host_address=self.image,
            nbytes=self.weights.nbytes,
            wanted=np.ones(count, dtype=np.bool_),
            valid=np.ones(count, dtype=np.bool_),
            known=numbers[0],
            source=numbers[1],
            checked=numbers[2],
        )
        self.device.wake(regions, [image], CHUNK, THREADS)

    def map(self, *regions: Region) -> None:
        self.device.map(regions)


@contextmanager
def scene_of(device: Device, image: int, weights_bytes: int, cache_bytes: int, extent_bytes: int) -> Iterator[Scene]:
    scene = Scene(device, image, weights_bytes, cache_bytes, extent_bytes)
    try:
        yield scene
    finally:
        scene.close()


def beside(work: Callable[[], object], other: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    other()
    thread.join()


# ---- orders ----------------------------------------------------------------------------------------------------------------

Order = Callable[[Scene], None]


def checked(scene: Scene) -> None:
    scene.wake(scene.weights, scene.cache)


def checked_all_first(scene: Scene) -> None:
    scene.map(scene.weights, scene.cache)
    scene.wake()


def checked_cache_after(scene: Scene) -> None:
    scene.wake(scene.weights)
    scene.map(scene.cache)


def all_first(scene: Scene) -> None:
    scene.map(scene.weights, scene.cache)
    scene.copy()


def cache_after(scene: Scene) -> None:
    scene.map(scene.weights)
    scene.copy()
    scene.map(scene.cache)


def cache_beside(scene: Scene) -> None:
    scene.map(scene.weights)
    beside(scene.copy, lambda: scene.map(scene.cache))


def kernel_all_first(scene: Scene) -> None:
    scene.map(scene.weights, scene.cache)
    scene.copy_by_kernel()


ORDERS: dict[str, Order] = {
    "torpor: copies are started as memory is made, checked": checked,
    "the same, the cache after the copies": checked_cache_after,
    "the same, all memory first": checked_all_first,
    "copy engine, all memory first": all_first,
    "copy engine, cache beside the copies": cache_beside,
    "copy engine, cache after the copies": cache_after,
    "kernel, all memory first": kernel_all_first,
}


def one_round(scene: Scene, order: Order, pause_s: float) -> float:
    time.sleep(SETTLE_S)
    scene.device.unmap([scene.weights, scene.cache])
    time.sleep(pause_s)
    began = time.perf_counter()
    order(scene)
    took = time.perf_counter() - began
    scene.map(scene.weights, scene.cache)
    return took


def measure(scene: Scene, until: float) -> dict[str, dict[str, common.Samples]]:
    """Every order once at least, and again while there is time for all of them."""
    values: dict[str, dict[str, list[float]]] = {name: {when: [] for when in PAUSES} for name in ORDERS}
    round_s = 0.0
    while time.perf_counter() + round_s < until or not round_s:
        began = time.perf_counter()
        for when, pause_s in PAUSES.items():
            for name, order in ORDERS.items():
                values[name][when].append(one_round(scene, order, pause_s))
        round_s = time.perf_counter() - began
    return {name: {when: common.Samples(tuple(v)) for when, v in times.items()} for name, times in values.items()}


# ---- copies while the device clears ----------------------------------------------------------------------------------------


def time_line(device: Device, image: int, nbytes: int, copy: Callable[[int, int], None], released: Region) -> list[float]:
    """GB/s of each BUCKET_S after ``released`` was unmapped, of copies into memory that stays."""
    with device.create_region(nbytes, extent_bytes=512 * MIB) as target:
        time.sleep(SETTLE_S)
        device.unmap([released])
        began = time.perf_counter()
        ends = []
        for offset in range(0, nbytes, PIECE):
            copy(target.address + offset, image + offset)
            ends.append(time.perf_counter() - began)
        device.map([released])
    return rates(ends)


def rates(ends: list[float]) -> list[float]:
    """Bytes count evenly over the time in which their piece was copied."""
    moved = [0.0] * (int(ends[-1] / BUCKET_S) + 1)
    for start, end in zip([0.0, *ends], ends, strict=False):
        for bucket in range(int(start / BUCKET_S), int(end / BUCKET_S) + 1):
            share = min(end, (bucket + 1) * BUCKET_S) - max(start, bucket * BUCKET_S)
            moved[bucket] += PIECE * max(0.0, share) / (end - start)
    return [m / BUCKET_S / 1e9 for m in moved[:-1]]


def time_lines(device: Device, image: int, nbytes: int, released_bytes: int) -> dict[str, list[float]]:
    ids = np.arange(PIECE // CHUNK, dtype=np.uint64)
    ways: dict[str, Callable[[int, int], None]] = {
        "copy engine": lambda dst, src: device.copy("to_device", [(dst, src, PIECE)]),
        "kernel": lambda dst, src: device.copy_blocks(dst, src, CHUNK, ids, ids),
    }
    with device.create_region(released_bytes, extent_bytes=512 * MIB) as released:
        return {name: time_line(device, image, nbytes, way, released) for name, way in ways.items()}


# ---- all of it -------------------------------------------------------------------------------------------------------------


def rows_of(found: dict[str, dict[str, common.Samples]], link_s: float) -> list[list[Any]]:
    return [
        [name, *(f"{1e3 * times[when].median:.0f} ({times[when].median / link_s:.2f})" for when in PAUSES)]
        for name, times in found.items()
    ]


def show_lines(run: common.Run, lines: dict[str, list[float]]) -> None:
    shown = range(min(12, *map(len, lines.values())))
    columns = [f"{1e3 * BUCKET_S * b:.0f}" for b in shown]
    rows = [[name, *(f"{line[b]:.0f}" for b in shown)] for name, line in lines.items()]
    run.table("GB/s of copies, by milliseconds after the release", ["", *columns], rows)


def main() -> None:
    began = time.perf_counter()
    options = common.arguments(__doc__, weights=16.0, cache=32.0, extent=512, seconds=40.0)
    if options.quick:
        options.seconds = 20.0
    run = common.Run("gpu_wake_orders", "orders of a wake: creating memory against copying", options.out)
    weights_bytes, cache_bytes = int(options.weights * GIB), int(options.cache * GIB)
    with Device.open("cuda") as device, device.create_arena(weights_bytes) as arena:
        device.hash_path()  # compiled before anything is timed
        arena.commit(0, weights_bytes, THREADS)
        lines = time_lines(device, arena.address, weights_bytes, weights_bytes + cache_bytes)
        show_lines(run, lines)
        with scene_of(device, arena.address, weights_bytes, cache_bytes, options.extent * MIB) as scene:
            link = common.interleaved({"link": scene.copy}, 2)["link"]
            found = measure(scene, began + options.seconds)
    rounds = len(next(iter(found.values()))["later"].values)
    title = f"extents of {options.extent} MiB; ms (times the link, {1e3 * link.median:.0f}), medians of {rounds}"
    run.table(title, ["", *PAUSES], rows_of(found, link.median))
    run.write({"link": link, "seconds": found, "gb_per_s_after_release": lines}, [])


if __name__ == "__main__":
    main()
