"""What others take for the same sleep and wake, and the link itself: 16 GiB of weights that must survive, 32 GiB of KV cache.

    .venv/bin/python benchmarks/gpu_peers.py                       # 80 s, 48 GiB of one GPU, 16 GiB of host memory
    .venv/bin/python benchmarks/gpu_peers.py --weights-gib 2 --kv-gib 4

Each in a process of its own, on the GPU that CUDA shows first:

    link             one copy of the weights' bytes each way, from and to page-locked memory in huge pages
    pin_memory       torch's page-locked host memory for the weights' bytes
    tms              torch-memory-saver, weights with a backup in host memory that it takes anew for every sleep
    tms retain       the same, that memory kept: every sleep copies all of the weights into it
    tms no backup    only when asked for by --cases: weights dropped, the floor of its unmapping and mapping
    torpor           the same tensors in torpor's pools, images made before the first sleep

Wakes follow their sleep at once and after a second by turns: at once, the device still clears what was given back; later, the
driver first takes it back into its books. A peer copies in every sleep; of torpor's, those that found nothing changed and those
that found every chunk changed are told apart. A peer's wake maps and restores the weights, and maps the KV cache after that, its
fastest order; every wake is checked by a sum over the weights. No case is begun after ``--seconds``; ``--quick``: a round, of
``link``, ``torpor`` and ``tms retain`` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import machine
import peers_cases
from peers_cases import GIB
from rich.markup import escape

PEERS = ("tms", "tms_retain")
COMPARED = (  # theirs, torpor's
    ("first_sleep_s", "first_sleep_s", "first sleep"),
    ("later_sleep_s", "clean_sleep_s", "clean sleep"),  # a peer copies, whether anything has changed or not
    ("later_sleep_s", "changed_sleep_s", "changed sleep"),
    ("wake_s", "wake_s", "wake at once"),
    ("wake_later_s", "wake_later_s", "wake a second later"),
)
LAST_CASE_S = 25.0  # the one that runs when the time is up may end
CASES = ("link", "torpor", "tms retain", "pin_memory", "tms")  # the longest, which says least, last
QUICK_CASES = CASES[:3]


# ---- in the parent -----------------------------------------------------------------------------------------------------------


def run_case(case: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """What the child measured. ValueError with its last words when it could not; TimeoutExpired."""
    rounds = {"tms": 1, "tms retain": 2 * options.rounds}.get(case, options.rounds)  # every sleep of the first takes seconds
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
    if "sleep_s" in measured:  # a peer
        first, *later = measured.pop("sleep_s")
        measured |= {"first_sleep_s": [first], "later_sleep_s": later}
    if "wake_s" in measured:
        times = {key: common.Samples(tuple(value)) for key, value in measured.items() if isinstance(value, list)}
        return {**{key: value for key, value in measured.items() if key not in times}, **times}
    ways = {key: common.Samples(tuple(value)) for key, value in measured.items() if isinstance(value, list)}
    rates = {key.replace("_s", "_gb_per_s"): weights_bytes / statistics.median(value.values) / 1e9 for key, value in ways.items()}
    return {**measured, **ways, **rates}


def show(run: common.Run, results: dict[str, Any]) -> None:
    names = {
        "first_sleep_s": "first sleep",
        "later_sleep_s": "later sleep",
        "clean_sleep_s": "nothing changed",
        "changed_sleep_s": "all changed",
        "wake_s": "wake at once",
        "wake_later_s": "a second later",
    }
    sleepers = {case: figures for case, figures in results.items() if "wake_s" in figures}
    rows = [
        [case, *(common.scaled(figures[key], 1e3) if key in figures else "" for key in names), figures["returned_gib"]]
        for case, figures in sleepers.items()
    ]
    run.table("peers, ms: median (lowest-highest)", ["", *names.values(), "GiB given back"], rows)
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


def against_peers(results: dict[str, Any]) -> Iterator[common.Goal]:
    """Each peer that keeps its weights, against torpor in the same run."""
    for peer in PEERS if "torpor" in results else ():
        for theirs, ours, what in COMPARED:
            if theirs in results.get(peer, {}) and ours in results["torpor"]:
                own, limit = results["torpor"][ours].median, results[peer][theirs].median
                measured, needed = f"{1e3 * own:.0f} ms", f"under {1e3 * limit:.0f} ms"
                yield common.Goal(what=f"{what}, against {peer}", measured=measured, needed=needed, reached=own < limit)


def main() -> None:
    weights_gib, kv_gib = machine.weights_and_kv_gib()
    options = common.arguments(
        __doc__,
        weights_gib=weights_gib,
        kv_gib=kv_gib,
        rounds=3,
        cases="",
        hook_mode="preload",
        seconds=75.0,
        child="",
    )
    if options.child:
        peers_cases.run(options)
    if options.quick:
        options.rounds = 1
    cases = options.cases.split(",") if options.cases else QUICK_CASES if options.quick else CASES
    run = common.Run(
        "gpu_peers", f"peers: {options.weights_gib:g} GiB of weights, {options.kv_gib:g} GiB of KV cache", options.out
    )
    deadline = time.monotonic() + options.seconds
    tried = {case: try_case(case, options, run, deadline) for case in cases}
    weights_bytes = int(options.weights_gib * GIB)
    found = {case.replace(" ", "_"): summary(case, measured, weights_bytes) for case, measured in tried.items() if measured}
    if not found:
        raise SystemExit("nothing could be measured")
    show(run, found)
    results = {"weights_gib": options.weights_gib, "kv_gib": options.kv_gib, **found}
    run.write(results, list(against_peers(results)))


if __name__ == "__main__":
    main()
