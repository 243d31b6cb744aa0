"""The demo's figures: a prefill/decode pair that sleeps, wakes and answers the same, per connector.

    .venv/bin/python benchmarks/demo.py                              # the host driver, two minutes
    .venv/bin/python benchmarks/demo.py --memory-driver cuda --connectors ipc

Exits with 1 when the demo did not pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

MIB = 1 << 20


def run_demo(options: Any) -> tuple[int, dict[str, Any]]:
    """The exit status, and what it wrote: nothing when it ended early."""
    connectors = [word for name in options.connectors.split(",") for word in ("--connector", name)]
    with tempfile.TemporaryDirectory(prefix="torpor-demo-figures-") as folder:
        written = Path(folder, "demo.json")
        command = [sys.executable, "-m", "torpor", "demo", *connectors, "--model", options.model, "--cycles", str(options.cycles)]
        command += ["--memory-driver", options.memory_driver, "--json", str(written)]
        status = subprocess.run(command, env=common.environment(), check=False).returncode
        return status, json.loads(written.read_text()) if written.exists() else {}


def of_connector(outcome: dict[str, Any]) -> dict[str, Any]:
    """By who slept (``d``, ``p``, ``d_p``): first sleep, later sleeps and wakes at level 1; and what all rows have in sum."""
    rows = outcome["rows"]
    whole: dict[str, Any] = {
        "rounds": len(rows),
        "rounds_passed": sum(row["passed"] for row in rows),
        "pulls": outcome["pulls"],
        "path": outcome["path"],
        "held_bytes": sum(row["held_bytes"] for row in rows),
    }
    for who in dict.fromkeys(row["who"] for row in rows):
        first, *later = [row for row in rows if row["who"] == who and row["level"] == 1]
        whole[who.lower().replace("+", "_")] = {
            "mib": first["unmapped_bytes"] / MIB,
            "first_sleep_ms": first["sleep_ms"],
            **({"later_sleep_ms": common.Samples(tuple(row["sleep_ms"] for row in later))} if later else {}),
            "wake_ms": common.Samples(tuple(row["wake_ms"] for row in (first, *later))),
        }
    return whole


def show(run: common.Run, outcome: dict[str, Any]) -> None:
    columns = ["asleep", "cycle", "level", "same answers", "MiB unmapped", "MiB held", "sleep, ms", "wake, ms"]
    rows = [
        [
            row["who"],
            row["cycle"],
            row["level"],
            f"{row['identical']}/{row['asked']}",
            round(row["unmapped_bytes"] / MIB, 1),
            row["held_bytes"] / MIB,
            row["sleep_ms"],
            row["wake_ms"],
        ]
        for row in outcome["rows"]
    ]
    run.table(f"sleep and wake over {outcome['connector']}", columns, rows)


def main() -> None:
    options = common.arguments(
        __doc__,
        memory_driver="host",
        connectors="ipc,nixl",
        model="builtin:smollm2-135m",
        cycles=2,
        name="demo",
    )
    if options.quick:
        options.cycles, options.connectors = 1, options.connectors.split(",")[0]
    gpu = options.memory_driver == "cuda"
    run = common.Run(
        options.name, f"torpor demo, {options.memory_driver} driver, {Path(options.model).name}", options.out, gpu=gpu
    )
    status, written = run_demo(options)
    if not written:
        raise SystemExit(status or 1)
    for outcome in written["connectors"]:
        show(run, outcome)
    goals = [
        common.Goal(
            what=f"demo over {outcome['connector']}: same answers, every byte back",
            measured=outcome["error"] or f"{of_connector(outcome)['rounds_passed']} of {len(outcome['rows'])} rounds",
            reached=outcome["passed"],
        )
        for outcome in written["connectors"]
    ]
    results = {o["connector"]: of_connector(o) for o in written["connectors"] if o["rows"]}
    run.write({**results, "seconds": written["seconds"], "phases_s": written["phases_s"]}, goals)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
