"""In which order a wake creates memory and copies: what was tried, on one GPU, against the link.

    python benchmarks/gpu_wake_orders.py

16 GiB that are copied back from page-locked memory ("weights"), 32 GiB that only need memory ("cache"). Driver calls only,
through ``torpor._native``; what arrived is checked only where it says so. ``at once``: the memory was released milliseconds
before, and the device is still clearing it; ``later``: a second before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np

from torpor._native import ChunkImage, Device, Region

GIB, MIB = 1 << 30, 1 << 20
CHUNK = 2 * MIB
EXTENTS = (64, 256, 512, 1024)
DEFAULT_EXTENT = 512
PAUSES = {"at once": 0.0, "later": 1.0}
SETTLE_S = 0.3  # before every round: what the last one released has been cleared
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


def beside(work: Callable[[], object], other: Callable[[], object], delay_s: float = 0.0) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(delay_s)
    other()
    thread.join()


# ---- orders ----------------------------------------------------------------------------------------------------------------


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


def weights_alone(scene: Scene) -> None:
    scene.map(scene.weights)
    scene.copy()


def cleared_first(scene: Scene) -> None:
    scene.map(scene.weights, scene.cache)
    time.sleep(0.15)
    scene.copy()


def kernel_all_first(scene: Scene) -> None:
    scene.map(scene.weights, scene.cache)
    scene.copy_by_kernel()


def kernel_cache_beside(scene: Scene) -> None:
    scene.map(scene.weights)
    beside(scene.copy_by_kernel, lambda: scene.map(scene.cache))


def checked(scene: Scene) -> None:
    scene.wake(scene.weights, scene.cache)


def checked_all_first(scene: Scene) -> None:
    scene.map(scene.weights, scene.cache)
    scene.wake()


ORDERS: dict[str, Callable[[Scene], None]] = {
    "torpor: copies from the first extent on, checked": checked,
    "the same, all memory first": checked_all_first,
    "copy engine, all memory first": all_first,
    "copy engine, cache beside the copies": cache_beside,
    "copy engine, cache after the copies": cache_after,
    "copy engine, all memory, then 0.15 s, then copies": cleared_first,
    "copy engine, weights alone": weights_alone,
    "kernel, all memory first": kernel_all_first,
    "kernel, cache beside the copies": kernel_cache_beside,
}


def one_round(scene: Scene, order: Callable[[Scene], None], pause_s: float) -> float:
    time.sleep(SETTLE_S)
    scene.device.unmap([scene.weights, scene.cache])
    time.sleep(pause_s)
    began = time.perf_counter()
    order(scene)
    took = time.perf_counter() - began
    scene.map(scene.weights, scene.cache)
    return took


def measure(scene: Scene, orders: dict[str, Callable[[Scene], None]], rounds: int) -> dict[str, dict[str, common.Samples]]:
    found: dict[str, dict[str, common.Samples]] = {}
    for when, pause_s in PAUSES.items():
        cases = {name: lambda order=order: one_round(scene, order, pause_s) for name, order in orders.items()}  # type: ignore[misc]  # noqa: B023
        for name, samples in common.interleaved(cases, rounds, warmup=0).items():
            found.setdefault(name, {})[when] = samples
    return found


def link(scene: Scene, rounds: int) -> common.Samples:
    return common.interleaved({"link": scene.copy}, rounds)["link"]


def rows_of(found: dict[str, dict[str, common.Samples]], link_s: float) -> list[list[Any]]:
    return [
        [name, *(f"{1e3 * times[when].median:.0f} ({times[when].median / link_s:.2f})" for when in PAUSES)]
        for name, times in found.items()
    ]


def main() -> None:
    options = common.arguments(__doc__, weights=16.0, cache=32.0, rounds=5)
    run = common.Run("gpu_wake_orders", "orders of a wake: creating memory against copying", options.out)
    weights_bytes, cache_bytes = int(options.weights * GIB), int(options.cache * GIB)
    document: dict[str, Any] = {}
    with Device.open("cuda") as device, device.create_arena(weights_bytes) as arena:
        device.hash_path()  # compiled before anything is timed
        arena.commit(0, weights_bytes, THREADS)
        for extent in EXTENTS:
            scene = Scene(device, arena.address, weights_bytes, cache_bytes, extent * MIB)
            if "link" not in document:
                document["link"] = link(scene, options.rounds)
            orders = ORDERS if extent == DEFAULT_EXTENT else dict(list(ORDERS.items())[:2])
            document[f"{extent} MiB"] = measure(scene, orders, options.rounds)
            scene.close()
            title = f"extents of {extent} MiB; ms (times the link), medians of {options.rounds}"
            run.table(title, ["", *PAUSES], rows_of(document[f"{extent} MiB"], document["link"].median))
    run.write({"seconds": document}, [])


if __name__ == "__main__":
    main()
