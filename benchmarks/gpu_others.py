"""Other sleepers, each in a process of its own, doing what gpu_sleep.py does. What cannot be imported is left out.

torch-memory-saver, as it comes and keeping its copies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import common

CHILD = """
import json, sys, time
import torch
from torch_memory_saver import torch_memory_saver as saver

weights_bytes, kv_bytes, rounds, retain = (int(x) for x in sys.argv[1:])
with saver.region(tag="weights", enable_cpu_backup=True):
    weights = torch.empty(weights_bytes, dtype=torch.uint8, device="cuda")
with saver.region(tag="kv_cache"):
    kv = torch.empty(kv_bytes, dtype=torch.uint8, device="cuda")
weights.view(torch.int64).random_()
if retain:
    saver.retain_cpu_backup = True


def timed(call):
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


sleeps, wakes = [], []
for _ in range(rounds + 1):
    sleeps.append(timed(saver.pause))
    wakes.append(timed(saver.resume))
print(json.dumps({"first sleep": sleeps[:1], "sleep": sleeps[1:], "wake": wakes[1:]}))
"""


def measure(weights_bytes: int, kv_bytes: int, rounds: int) -> dict[str, dict[str, common.Samples]]:
    """Seconds by peer and case."""
    try:
        from torch_memory_saver.utils import get_binary_path_from_package
    except ImportError:
        common.console.print("torch_memory_saver is not installed: no peers")
        return {}
    hook = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    arguments = [str(weights_bytes), str(kv_bytes)]
    found = {}
    # As it comes it allocates and page-locks anew in every sleep, seven seconds each: two rounds tell that.
    for name, retain, times in (("torch-memory-saver, retain_cpu_backup", 1, rounds), ("torch-memory-saver", 0, min(rounds, 2))):
        command = [sys.executable, "-c", CHILD, *arguments, str(times), str(retain)]
        done = subprocess.run(command, env={**os.environ, "LD_PRELOAD": hook}, capture_output=True, text=True, timeout=120)
        if done.returncode:
            common.console.print(f"{name} failed: {done.stderr[-2000:]}")
            continue
        seconds = json.loads(done.stdout.splitlines()[-1])
        found[name] = {case: common.Samples(tuple(values)) for case, values in seconds.items()}
    return found


def row(name: str, peer: dict[str, common.Samples]) -> list[Any]:
    return [name, *(common.Samples(tuple(1e3 * s for s in peer[case].values)) for case in ("first sleep", "sleep", "wake"))]
