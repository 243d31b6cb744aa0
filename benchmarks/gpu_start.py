"""What host images cost an engine's start: an 8B model from safetensors, with the images of its first sleep and without.

    .venv/bin/python benchmarks/gpu_start.py               # about 100 s
    .venv/bin/python benchmarks/gpu_start.py --quick       # four layers, one round

The files lie in memory (a page cache that is never cold), in the shape of Qwen3-8B, with random values. Every start is a core in
a process of its own, as a server has it; compile caches are warm from the second on, and the first is not counted.

    without      no image is made: the first sleep makes it
    images       made while the weights load, in host memory that is taken from the first moment on (the default)
    first sleep  what each leaves to it
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import common
import gpu_engine
import torch
from shared_images import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

CASES = {"without": False, "images": True}
GOAL_SHOWN_S = 0.3  # of an image, in a start


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of the model holds."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def start(folder: Path, prepare: bool, kv_gib: float) -> dict[str, Any]:
    engine = gpu_engine.Engine(folder, "auto", prepare_images=prepare, kv_cache_bytes=int(kv_gib * 2**30))
    try:
        table, ready = dict(engine.info.startup), engine.ready_s
        slept = engine.sleep()
        engine.wake()
        print(prepare, round(ready, 2), table, slept, flush=True)
        return {"ready_s": ready, "first_token_s": engine.first_token_s, "first_sleep_s": slept["seconds"], "table": table}
    finally:
        engine.close()


def seconds_of(table: dict[str, str]) -> dict[str, float]:
    """The phases of a start."""
    return {name.removesuffix(" took"): float(text.split()[0]) for name, text in table.items() if name.endswith(" took")}


def main() -> None:
    options = common.arguments(__doc__, rounds=3, layers=36, kv=4.0)
    if options.quick:
        options.rounds, options.layers = 1, 4
    run = common.Run("gpu_start", "an engine's start on a GPU, with and without the images of its first sleep", options.out)
    folder = gpu_engine.write_model(Path(tempfile.mkdtemp(prefix="torpor-bench-")), num_hidden_layers=options.layers)
    try:
        with checkpoint(folder, shapes_of(folder), on_gpu=True):
            start(folder, False, options.kv)
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
            for round_ in range(options.rounds):
                for name in list(CASES)[:: 1 if round_ % 2 else -1]:
                    found[name].append(start(folder, CASES[name], options.kv))
    finally:
        shutil.rmtree(folder)
    samples = {
        name: {key: common.Samples(tuple(one[key] for one in starts)) for key in ("ready_s", "first_token_s", "first_sleep_s")}
        for name, starts in found.items()
    }
    run.table(
        "seconds", ["", "ready", "first token", "first sleep"], [[name, *values.values()] for name, values in samples.items()]
    )
    phases = {name: common.medians([seconds_of(one["table"]) for one in starts]) for name, starts in found.items()}
    rows = [[phase, *(phases[name].get(phase, "") for name in CASES)] for phase in phases["images"]]
    run.table("where the time goes, seconds (medians)", ["", *CASES], rows)
    memory = [one["table"].get("images' host memory", "") for one in found["images"]]
    run.note(f"images' host memory: {memory[-1]}")
    shown = samples["images"]["ready_s"].median - samples["without"]["ready_s"].median
    goal = common.Goal(
        what="what an image adds to a start",
        measured=f"{shown:.2f} s",
        needed=f"at most {GOAL_SHOWN_S:g}",
        reached=shown <= GOAL_SHOWN_S,
    )
    run.write({"starts": samples, "phases_s": phases, "host_memory": memory}, [goal])


if __name__ == "__main__":
    main()
