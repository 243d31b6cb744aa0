"""``scripts/gpu``: runs the parts, side by side where they do not disturb each other, each under a limit; one that fails does not
stop the others."""

from __future__ import annotations

import argparse
import datetime
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from board import SHARE, Board, Start, played
from parts import ROOT, Part, all_parts, chosen
from place import Place, SetUpError, gpu_names, model_for_demo, set_up
from report import Result, print_table, result_of, tail, write_run
from watch import Watched, no_core_files

STOP_S = 12.0
"""What stopping a part, its stacks written first, may take of the time."""
TABLE_S = 2.0

EPILOG = """
parts, each with a log of its own:
  engine, sleep, peers, attention, transfer ...   benchmarks/gpu_*.py, which write <device>.json
  demo, demo-8b       a pair of engines that sleeps and wakes: the model of --model, and random weights of the Qwen3-8B shape
  unfollowed          the fault, shown: a peer that does not follow reads old bytes and holds memory
  tests               tests/gpu, a process for each file: tests:memory, tests:engine ...

With two GPUs benchmarks run on the first and the rest on the second, then what needs both; on one GPU, everything in turn.
Several test files share a GPU where each process can tell its own memory. What no time is left for is not begun, and named.

exit status: 0 all parts ended well, 1 one did not or was not begun, 2 there was no way to begin
"""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description="Everything that needs a GPU: its tests, the demos, the benchmarks; a table, and every figure as JSON.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, set-up included (default: %(default)g)")
    parser.add_argument("--only", default="", help="these parts, separated by commas: tests, demo, sleep, tests:engine ...")
    parser.add_argument("--plan", action="store_true", help="print what would run, when and where, and end")
    parser.add_argument("--gpus", type=int, default=2, help="use at most so many (default: %(default)d)")
    parser.add_argument("--quick", action="store_true", help="short benchmarks; also taken when they do not fit otherwise")
    parser.add_argument("--slow", action="store_true", help="the slow tests too; give them --minutes")
    parser.add_argument("--strict", action="store_true", help="a goal that is missed fails the run too")
    parser.add_argument(
        "--model",
        default="auto",
        help="of demo and unfollowed: a folder, a .gguf, random; NAME.gguf.part* in a folder are joined",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements", help="folder for <device>.json")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu", help="folder for what the parts print")
    parser.add_argument("--system-python", action="store_true", help="use this python3 and its packages, not .venv")
    parser.add_argument("--wheels", type=Path, help="with --system-python: a folder of wheels, installed beside its packages")
    return parser.parse_args(arguments)


def main() -> int:
    began, asked = time.monotonic(), options()
    out, logs = asked.out.resolve(), asked.logs.resolve()
    model = model_for_demo(asked.model, asked.system_python)
    if asked.plan:
        parts = parts_for(asked, out, model, max(1, min(asked.gpus, len(gpu_names()) or asked.gpus)), 60 * asked.minutes)
        return print_plan(parts, asked)
    logs.mkdir(parents=True, exist_ok=True)
    no_core_files()
    try:
        place = set_up(asked.system_python, asked.wheels.resolve() if asked.wheels else None, asked.gpus)
    except SetUpError as error:
        print(f"gpu: set-up failed: {error}", file=sys.stderr)
        return 2
    say(began, f"set up on {place.shown}")
    left_s = began + 60 * asked.minutes - time.monotonic() - STOP_S - TABLE_S
    parts = parts_for(asked, out, model, len(place.gpus), left_s, place.share)
    run = Run(place, out, logs, began, time.monotonic() + left_s)
    results = run.all(parts)
    print_table(results, logs)
    written = write_run(results, out, place, sys.argv[1:], began)
    failed = any(result.failure or (asked.strict and result.missed) for result in results)
    print(f"gpu: {time.monotonic() - began:.0f} s in all, figures in {written}")
    return 1 if failed else 0


def log_of(part: Part, logs: Path) -> Path:
    return logs / f"{part.name.replace(':', '-').replace('/', '-')}.log"


def say(began: float, text: str) -> None:
    print(f"gpu: [{time.monotonic() - began:3.0f} s] {text}", flush=True)


def parts_for(asked: argparse.Namespace, out: Path, model: str, gpus: int, left_s: float, share: int = SHARE) -> list[Part]:
    """At length where that fits, else with short benchmarks."""

    def these(quick: bool) -> list[Part]:
        return chosen(all_parts(out, model, quick=quick, slow=asked.slow, gpus=gpus, minutes=asked.minutes), asked.only)

    parts = these(asked.quick)
    if asked.quick or fits(parts, gpus, share, left_s):
        return parts
    short = these(True)
    if sum(part.takes_s for part in short) < sum(part.takes_s for part in parts):
        print(f"gpu: the benchmarks are short ones: at length it would not fit into {asked.minutes:g} minutes; see --minutes")
    return short


def fits(parts: Sequence[Part], gpus: int, share: int, left_s: float) -> bool:
    return sum(1 for _ in played(parts, gpus, share, left_s)) == len(parts)


def print_plan(parts: Sequence[Part], asked: argparse.Namespace) -> int:
    gpus = max(1, min(asked.gpus, len(gpu_names()) or asked.gpus))
    print(f"{'part':24}{'gpu':6}{'from':>6}{'to':>6}{'limit':>7}  seconds, as seen on an H200, of {60 * asked.minutes:.0f}")
    begun = set()
    for at, start, ends in played(parts, gpus, SHARE, 60 * asked.minutes - STOP_S - TABLE_S):
        begun.add(start.part.name)
        print(f"{start.part.name:24}{','.join(map(str, start.gpus)):6}{at:6.0f}{ends:6.0f}{start.limit_s:7.0f}")
    for part in parts:
        if part.name not in begun:
            print(f"{part.name:24}{'-':6}{'':19}  no time: takes about {part.takes_s:.0f}")
    return 0


class Run:
    """The parts in their processes. A signal to this one ends all of them, and what is known by then is still told."""

    def __init__(self, place: Place, out: Path, logs: Path, began: float, deadline: float) -> None:
        self._place, self._out, self._logs, self._began, self._deadline = place, out, logs, began, deadline
        self._ended: queue.SimpleQueue[Result | None] = queue.SimpleQueue()  # a signal handler may use it
        self._watched: list[Watched] = []
        self._stopping = ""

    def all(self, parts: Sequence[Part]) -> list[Result]:
        """In the order of ``parts``."""
        board, results = Board(parts, len(self._place.gpus), self._place.share), {}
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        while True:
            for start in [] if self._stopping else board.begin(self._deadline - time.monotonic()):
                self._begin(start)
            if not board.running:
                break
            if (result := self._ended.get()) is not None:
                board.end(result.part)
                results[result.part.name] = result
                self._tell(result)
        left_s = max(0.0, self._deadline - time.monotonic())
        for part in board.waiting:
            reason = self._stopping or f"it takes about {part.takes_s:.0f} s, {board.left_for(part, left_s):.0f} s were left"
            results[part.name] = Result(part, 0.0, f"not begun: {reason}")
        return [results[part.name] for part in parts]

    def _begin(self, start: Start) -> None:
        gpus = ", ".join(self._place.gpus[number] for number in start.gpus)
        say(self._began, f"{start.part.name} begins on GPU {gpus}, at most {start.limit_s:.0f} s")
        threading.Thread(target=self._run, args=(start,), daemon=True).start()

    def _run(self, start: Start) -> None:
        try:
            result = self.one(start)
        except Exception as error:
            result = Result(start.part, 0.0, f"scripts/gpu itself failed: {error!r}")
        self._ended.put(result)

    def one(self, start: Start) -> Result:
        """Runs it and waits for its end. What it prints is in its log."""
        part, log = start.part, log_of(start.part, self._logs)
        began, when = time.monotonic(), datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        environment = {**self._place.environment, **part.environment, **self._place.shows(start.gpus)}
        with log.open("wb") as file, tempfile.TemporaryDirectory(prefix="torpor-gpu-") as empty:
            if part.cold:
                environment |= {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
            watched = Watched([self._place.python, *part.arguments], file.fileno(), environment, cwd=ROOT)
            self._watched.append(watched)
            if self._stopping:  # the signal came in between
                watched.end_early()
            status = watched.wait(start.limit_s)
        result = result_of(part, time.monotonic() - began, status, log, self._out, when)
        result.gpus = tuple(self._place.gpus[number] for number in start.gpus)
        if status is None:
            result.failure = f"stopped after {start.limit_s:.0f} s" if not watched.ended_early else self._stopping
        return result

    def _tell(self, result: Result) -> None:
        words = result.failure or f"ended well: {result.says}"
        say(self._began, f"{result.part.name} {words} ({result.seconds:.0f} s)")
        if result.failure:
            log = log_of(result.part, self._logs)
            print(f"----- the end of {log}\n{tail(log)}\n-----", flush=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = f"ended by {signal.Signals(number).name}"
        for watched in self._watched:
            watched.end_early()
        self._ended.put(None)


if __name__ == "__main__":
    sys.exit(main())
