"""``scripts/gpu``: runs the parts one after another, each under a limit; one that fails does not stop the others."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from parts import ROOT, Part, all_parts, chosen
from place import Place, SetUpError, model_for_demo, set_up
from report import Result, print_table, result_of

GRACE_S = 5.0
TAIL_LINES = 40


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description="The GPU's tests, demo and benchmarks.")
    parser.add_argument(
        "--only", default="", help="parts, separated by commas: tests, demo, or a benchmark (sleep, peers, engine ...)"
    )
    parser.add_argument("--quick", action="store_true", help="short benchmarks")
    parser.add_argument("--slow", action="store_true", help="the slow tests too; give them --minutes")
    parser.add_argument("--strict", action="store_true", help="a goal that is missed fails the run too")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all parts together; what is left then is not started")
    parser.add_argument("--model", default="auto", help="for the demo; a folder with NAME.gguf.part* files is joined")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements", help="folder for <device>.json")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu", help="folder for what the parts print")
    parser.add_argument("--system-python", action="store_true", help="use this python3 and its packages, not .venv")
    parser.add_argument("--wheels", type=Path, help="with --system-python: a folder of wheels, installed beside its packages")
    return parser.parse_args()


def main() -> int:
    asked = options()
    began = time.monotonic()
    out, logs = asked.out.resolve(), asked.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    parts = chosen(
        all_parts(out, model_for_demo(asked.model, asked.system_python), quick=asked.quick, slow=asked.slow), asked.only
    )
    try:
        place = set_up(asked.system_python, asked.wheels.resolve() if asked.wheels else None)
    except SetUpError as error:
        print(f"gpu: set-up failed: {error}", file=sys.stderr)
        return 2
    print(f"gpu: set up in {time.monotonic() - began:.0f} s", flush=True)
    deadline = time.monotonic() + 60 * asked.minutes
    results = [run(part, place, out, logs, deadline) for part in parts]
    print_table(results, logs)
    failed = any(result.failure or (asked.strict and result.missed) for result in results)
    print(f"gpu: {time.monotonic() - began:.0f} s in all, figures in {out}")
    return 1 if failed else 0


def run(part: Part, place: Place, out: Path, logs: Path, deadline: float) -> Result:
    limit = min(part.limit_s, deadline - time.monotonic())
    if limit < 1:
        return Result(part, 0.0, "not started: no time was left")
    print(f"gpu: {part.name}, at most {limit:.0f} s", flush=True)
    log = logs / f"{part.name}.log"
    started, when = time.monotonic(), datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with log.open("wb") as file:
        status = run_within([place.python, *part.arguments], limit, file.fileno(), {**place.environment, **part.environment})
    result = result_of(part, time.monotonic() - started, status, log, out, when)
    if result.failure:
        print(f"gpu: {part.name}: {result.failure}; its last lines:")
        print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]), flush=True)
    return result


def run_within(command: list[str], limit_s: float, output: int, environment: dict[str, str]) -> int | None:
    """The exit status; None when it had to be stopped, with all the processes it started."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop_group(process)


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """Also after a regular end: an engine that a part left behind would hold the next part's memory."""
    for sign, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        ends = time.monotonic() + wait_s
        while time.monotonic() < ends and group_lives(process):
            time.sleep(0.05)
    process.wait()


def group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
