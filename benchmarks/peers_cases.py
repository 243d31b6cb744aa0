"""The cases of gpu_peers.py, each of which runs in a process of its own: the link, page-locked memory, and the sleepers."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GIB, MIB = 1 << 30, 1 << 20
HUGE = 2 * MIB
WEIGHT_BYTES, KV_BYTES = 256 * MIB, GIB  # of one tensor
MADV_POPULATE_WRITE = 23
PAUSE_S = 1.0
"""Before a wake that is not at once: what was released has been cleared by then."""


def measure_link(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.cuda.init()
    nbytes = int(options.weights_gib * GIB)
    began = time.perf_counter()
    host = page_locked(nbytes)
    ready = time.perf_counter() - began
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    ways = {
        "to_device_s": lambda: device.copy_(host, non_blocking=True),
        "to_host_s": lambda: host.copy_(device, non_blocking=True),
    }
    return {
        "page_locked_s": ready,
        **{name: [synchronised(way) for _ in range(options.rounds + 1)][1:] for name, way in ways.items()},
    }


def page_locked(nbytes: int) -> torch.Tensor:
    """Anonymous huge pages, populated on threads, then registered: some four times as fast as what torch does."""
    import torch

    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    host = whole[start : start + nbytes]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(populate, host.split(512 * MIB)))
    if code := int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0)):
        raise SystemExit(f"cudaHostRegister: error {code}")
    return host


def populate(piece: torch.Tensor) -> None:
    """By ctypes, which lets other threads run meanwhile. A kernel before 5.14 refuses; then the registration takes the pages."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(piece.nbytes), MADV_POPULATE_WRITE)


def measure_pin_memory(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.empty(int(options.weights_gib * GIB), dtype=torch.uint8, pin_memory=True)
    return {"page_locked_s": time.perf_counter() - began}


class Timed:
    """A sleeper's seconds: sleeps, and wakes at once and ``PAUSE_S`` later by turns."""

    def __init__(self, weights: Sequence[torch.Tensor], sleep: Callable[[], object], wake: Callable[[], object]) -> None:
        self._weights, self._sleep, self._wake = weights, sleep, wake
        self.seconds: dict[str, list[float]] = {}
        self.returned_gib = 0.0

    def turn(self, sleep: str, *, later: bool, checked: bool = True) -> None:
        import torch

        expected = total(self._weights) if checked else 0
        before = torch.cuda.mem_get_info()[0]
        self._add(sleep, self._sleep)
        self.returned_gib = (torch.cuda.mem_get_info()[0] - before) / GIB
        if later:
            time.sleep(PAUSE_S)
        self._add("wake_later_s" if later else "wake_s", self._wake)
        if checked and total(self._weights) != expected:
            raise SystemExit("what woke is not what was put to sleep")

    def _add(self, name: str, step: Callable[[], object]) -> None:
        self.seconds.setdefault(name, []).append(synchronised(step))

    def as_json(self, **facts: Any) -> dict[str, Any]:
        return {**self.seconds, "returned_gib": self.returned_gib, **facts}


def measure_tms(options: argparse.Namespace, *, backup: bool, retain: bool) -> dict[str, Any]:
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = options.hook_mode
    with saver.region(tag="weights", enable_cpu_backup=backup):
        weights = tensors(options.weights_gib, WEIGHT_BYTES)
    with saver.region(tag="kv"):
        kv = tensors(options.kv_gib, KV_BYTES)
    if retain:
        saver.retain_cpu_backup = True
    fill(weights)
    timed = Timed(weights, saver.pause, lambda: (saver.resume("weights"), saver.resume("kv")))
    for turn in range(1 + options.rounds):
        timed.turn("sleep_s", later=turn % 2 == 1, checked=backup)
    del kv
    return timed.as_json(hook_mode=options.hook_mode)


def measure_torpor(options: argparse.Namespace) -> dict[str, Any]:
    """As the peers: the weights' backup is there before the first sleep only where somebody made it, here with prepare_images."""
    from torpor.memory import Memory, MemoryConfig

    with Memory(MemoryConfig(driver="cuda")) as memory:
        pools = memory.pool("weights"), memory.pool("kv_cache", policy="discard")
        weights = tensors(options.weights_gib, WEIGHT_BYTES, pools[0].empty)
        kv = tensors(options.kv_gib, KV_BYTES, pools[1].empty)
        fill(weights)
        memory.prepare_images(fill=True)
        timed = Timed(weights, memory.sleep, memory.wake)
        timed.turn("first_sleep_s", later=False)
        for turn in range(options.rounds):
            memory.mark_valid("kv_cache")
            timed.turn("clean_sleep_s", later=turn % 2 == 0)
            memory.mark_valid("kv_cache")
            for tensor in weights:
                tensor[:: memory.config.chunk_bytes] += 1
            timed.turn("changed_sleep_s", later=turn % 2 == 1)
        found = timed.as_json()
        del kv, tensor
        weights.clear()
    return found


def tensors(gib: float, nbytes: int, empty: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    import torch

    count = max(1, int(gib * GIB) // nbytes)
    if empty is not None:
        return [empty(nbytes, torch.uint8) for _ in range(count)]
    return [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(count)]


def fill(weights: list[torch.Tensor]) -> None:
    """Random bytes: no page is like another."""
    for tensor in weights:
        tensor.random_(0, 256)


def total(weights: Sequence[torch.Tensor]) -> int:
    """Wraps around; any byte that changed alone changes it."""
    import torch

    return sum(int(tensor.view(torch.int64).sum()) for tensor in weights) & 0xFFFF_FFFF_FFFF_FFFF


def synchronised(step: Callable[[], Any]) -> float:
    """Seconds from an idle device to an idle device."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def run(options: argparse.Namespace) -> None:
    """The case that ``--child`` names; prints what it measured."""
    measured = {
        "link": measure_link,
        "pin_memory": measure_pin_memory,
        "torpor": measure_torpor,
        "tms": lambda o: measure_tms(o, backup=True, retain=False),
        "tms retain": lambda o: measure_tms(o, backup=True, retain=True),
        "tms no backup": lambda o: measure_tms(o, backup=False, retain=False),
    }[options.child](options)
    print("\n" + json.dumps(measured), flush=True)
    os._exit(0)  # its pools and the runtime take each other down on a regular exit
