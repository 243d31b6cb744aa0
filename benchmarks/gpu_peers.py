"""What others take for the same sleep and wake, and the link itself: 16 GiB of weights that must survive, 32 GiB of KV cache.

    .venv/bin/python benchmarks/gpu_peers.py                       # about a minute, 48 GiB of one GPU, 16 GiB of host memory
    .venv/bin/python benchmarks/gpu_peers.py --weights-gib 2 --kv-gib 4

Each in a process of its own, on the GPU that CUDA shows first:

    link             one copy of the weights' bytes each way, from and to page-locked memory in huge pages
    pin_memory       torch's page-locked host memory for the weights' bytes
    tms              torch-memory-saver, weights with a backup in host memory that it takes anew for every sleep
    tms retain       the same, that memory kept: every sleep copies all of the weights into it
    tms no backup    only when asked for by --cases: weights dropped, the floor of its unmapping and mapping

A later sleep is the median of those after the first. A wake maps and restores the weights, and maps the KV cache after that, its
fastest order; every wake is checked by a sum over the weights. No case is begun after ``--seconds``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import machine
from rich.markup import escape

if TYPE_CHECKING:
    import torch

GIB, MIB = 1 << 30, 1 << 20
HUGE = 2 * MIB
WEIGHT_BYTES, KV_BYTES = 256 * MIB, GIB  # of one tensor
MADV_POPULATE_WRITE = 23
COMPARED = (
    ("first_sleep_s", "first sleep"),
    ("later_sleep_s", "clean sleep"),  # a peer copies, whether anything has changed or not
    ("later_sleep_s", "changed sleep"),
    ("wake_s", "wake at once"),
)
LAST_CASE_S = 25.0  # the one that runs when the time is up may end
CASES = ("link", "tms retain", "tms", "pin_memory")


# ---- in the child: one case --------------------------------------------------------------------------------------------------


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


def measure_tms(options: argparse.Namespace, *, backup: bool, retain: bool) -> dict[str, Any]:
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = options.hook_mode
    with saver.region(tag="weights", enable_cpu_backup=backup):
        weights = tensors(options.weights_gib, WEIGHT_BYTES)
    with saver.region(tag="kv"):
        kv = tensors(options.kv_gib, KV_BYTES)
    if retain:
        saver.retain_cpu_backup = True
    fill(weights)
    expected = total(weights)
    seconds: dict[str, list[float]] = {"sleep_s": [], "wake_s": []}
    returned = []
    for _ in range(1 + options.rounds):
        before = torch.cuda.mem_get_info()[0]
        seconds["sleep_s"].append(synchronised(saver.pause))
        returned.append(torch.cuda.mem_get_info()[0] - before)
        seconds["wake_s"].append(synchronised(lambda: (saver.resume("weights"), saver.resume("kv"))))
        if backup and total(weights) != expected:
            raise SystemExit("what woke is not what was put to sleep")
    del kv
    return {**seconds, "returned_gib": returned[-1] / GIB, "hook_mode": options.hook_mode}


def tensors(gib: float, nbytes: int) -> list[torch.Tensor]:
    import torch

    return [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(max(1, int(gib * GIB) // nbytes))]


def fill(weights: list[torch.Tensor]) -> None:
    """Random bytes: no page is like another."""
    for tensor in weights:
        tensor.random_(0, 256)


def total(weights: list[torch.Tensor]) -> int:
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


def child(options: argparse.Namespace) -> None:
    measured = {
        "link": measure_link,
        "pin_memory": measure_pin_memory,
        "tms": lambda o: measure_tms(o, backup=True, retain=False),
        "tms retain": lambda o: measure_tms(o, backup=True, retain=True),
        "tms no backup": lambda o: measure_tms(o, backup=False, retain=False),
    }[options.child](options)
    print("\n" + json.dumps(measured), flush=True)
    os._exit(0)  # its pools and the runtime take each other down on a regular exit


# ---- in the parent -----------------------------------------------------------------------------------------------------------


def run_case(case: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """What the child measured. ValueError with its last words when it could not; TimeoutExpired."""
    rounds = 1 if case == "tms" else options.rounds  # every sleep of it takes seconds
    arguments = ["--child", case, "--rounds", str(rounds), "--hook-mode", options.hook_mode]
    sizes = ["--weights-gib", str(options.weights_gib), "--kv-gib", str(options.kv_gib)]
    with preloaded(case.startswith("tms") and options.hook_mode == "preload"):
        done = subprocess.run(
            [sys.executable, __file__, *arguments, *sizes],
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=common.environment(),
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ValueError(f"exit status {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
    return dict(json.loads(lines[-1]))


@contextlib.contextmanager
def preloaded(wanted: bool) -> Iterator[None]:
    """Its hook needs the CUDA runtime before Python has loaded torch, which brings it."""
    if not wanted:
        yield
        return
    import torch_memory_saver

    folders = [str(path.parent) for root in package_folders("nvidia") for path in root.glob("*/lib/libcudart.so.*")]
    searched = os.pathsep.join(filter(None, [*folders, os.environ.get("LD_LIBRARY_PATH")]))
    with changed("LD_LIBRARY_PATH", searched), torch_memory_saver.configure_subprocess():
        yield


def package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


@contextlib.contextmanager
def changed(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def try_case(case: str, options: argparse.Namespace, run: common.Run, deadline: float) -> dict[str, Any] | None:
    """With the other way of hooking where the asked one fails. None, and a note, where neither works or no time is left."""
    for mode in dict.fromkeys((options.hook_mode, "torch")) if case.startswith("tms") else (options.hook_mode,):
        if (left := deadline - time.monotonic()) < 0:
            run.note(f"{case}: no time was left")
            return None
        try:
            measured = run_case(case, argparse.Namespace(**{**vars(options), "hook_mode": mode}), left + LAST_CASE_S)
        except (ValueError, OSError, ImportError, subprocess.TimeoutExpired) as error:
            run.note(escape(f"{case} ({mode}): {error}"))
        else:
            run.note(escape(f"{case}: {common.rounded(measured, 4)}"))
            return measured
    return None


def summary(case: str, measured: dict[str, Any], weights_bytes: int) -> dict[str, Any]:
    """Medians, and what they say of the link."""
    if "sleep_s" in measured:
        first, *later = measured["sleep_s"]
        return {
            "first_sleep_s": first,
            "later_sleep_s": common.Samples(tuple(later)),
            "wake_s": common.Samples(tuple(measured["wake_s"])),
            **{key: measured[key] for key in ("returned_gib", "hook_mode")},
        }
    ways = {key: common.Samples(tuple(value)) for key, value in measured.items() if isinstance(value, list)}
    rates = {key.replace("_s", "_gb_per_s"): weights_bytes / statistics.median(value.values) / 1e9 for key, value in ways.items()}
    return {**measured, **ways, **rates}


def show(run: common.Run, results: dict[str, Any]) -> None:
    rows = []
    for case, figures in results.items():
        if "wake_s" in figures:
            milliseconds = [common.scaled(figures[key], 1e3) for key in ("later_sleep_s", "wake_s")]
            rows.append([case, 1e3 * figures["first_sleep_s"], *milliseconds, figures["returned_gib"]])
    run.table("peers, ms: median (lowest-highest)", ["", "first sleep", "later sleep", "wake", "GiB given back"], rows)
    if link := results.get("link"):
        ways = (("to the device", "to_device"), ("to the host", "to_host"))
        rows = [[name, common.scaled(link[f"{way}_s"], 1e3), link[f"{way}_gb_per_s"]] for name, way in ways]
        run.table("the link: one copy of the weights' bytes", ["", "ms", "GB/s"], rows)
    rows = [
        [name, results[case]["page_locked_s"]]
        for case, name in (("link", "huge pages, registered"), ("pin_memory", "torch"))
        if case in results
    ]
    run.table("page-locked host memory for the weights, s", ["", "s"], rows)


def against_torpor(results: dict[str, Any], ours: dict[str, Any]) -> Iterator[common.Goal]:
    """Each peer that keeps its weights, against what gpu_sleep.py measured for the same sizes: a wake that follows its sleep at
    once, as it does here."""
    same_sizes = (results["weights_gib"], results["kv_gib"]) == (ours["main"]["weights_gib"], ours["main"]["kv_gib"])
    for peer in ("tms", "tms_retain") if same_sizes else ():
        for what, case in COMPARED:
            if peer in results and case in ours["main"]["seconds"]:
                own, theirs = ours["main"]["seconds"][case]["median"], results[peer][what]
                limit = theirs.median if isinstance(theirs, common.Samples) else theirs
                measured, needed = f"{1e3 * own:.0f} ms", f"under {1e3 * limit:.0f} ms"
                yield common.Goal(what=f"{case}, against {peer}", measured=measured, needed=needed, reached=own < limit)


def main() -> None:
    weights_gib, kv_gib = machine.weights_and_kv_gib()
    options = common.arguments(
        __doc__,
        weights_gib=weights_gib,
        kv_gib=kv_gib,
        rounds=3,
        cases=",".join(CASES),
        hook_mode="preload",
        seconds=60.0,
        child="",
    )
    if options.child:
        child(options)
    if options.quick:
        options.rounds = 1
    run = common.Run(
        "gpu_peers", f"peers: {options.weights_gib:g} GiB of weights, {options.kv_gib:g} GiB of KV cache", options.out
    )
    deadline = time.monotonic() + options.seconds
    tried = {case: try_case(case, options, run, deadline) for case in options.cases.split(",")}
    weights_bytes = int(options.weights_gib * GIB)
    found = {case.replace(" ", "_"): summary(case, measured, weights_bytes) for case, measured in tried.items() if measured}
    if not found:
        raise SystemExit("nothing could be measured")
    show(run, found)
    results = {"weights_gib": options.weights_gib, "kv_gib": options.kv_gib, **found}
    ours = common.measured_lately(options.out, run.device, "gpu_sleep")
    run.write(results, list(against_torpor(results, ours)) if ours else ())


if __name__ == "__main__":
    main()
