"""What a part came to, the table at the end, and the run's own entry among the figures."""

from __future__ import annotations

import collections
import datetime
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts import ROOT, Part
from place import Place

sys.path.append(str(ROOT / "benchmarks"))

import machine
from document import put, without_places

RED, GREEN, PLAIN = ("\033[31m", "\033[32m", "\033[0m") if sys.stdout.isatty() or "FORCE_COLOR" in os.environ else ("",) * 3
COLOURS = re.compile(r"\033\[[0-9;]*m")
OUTCOME = re.compile(r"^(?P<test>tests/\S+::.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
BEGUN = re.compile(r"^(?P<test>tests/\S+::[^\s\[]+(?:\[.*?\])?)(?: |$)")
TAIL_LINES, BROKEN_SHOWN, WIDTH = 40, 8, 110


@dataclass
class Result:
    """``failure``: empty when the part ran to its end and exited with 0. ``tests``: how many passed, failed, were skipped ...;
    ``broken``: pytest's lines about those that did not pass."""

    part: Part
    seconds: float
    failure: str
    says: str = ""
    goals: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    gpus: tuple[str, ...] = ()

    @property
    def missed(self) -> int:
        return sum(not goal["reached"] for goal in self.goals)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "ended_well": not self.failure,
            "says": ", ".join(filter(None, [self.failure, self.says])),
            "gpus": len(self.gpus),
            **({"tests": self.tests} if self.tests else {}),
        }


def result_of(part: Part, seconds: float, status: int | None, log: Path, out: Path, began: str) -> Result:
    """``status``: None when it was stopped at its limit. ``began``: figures older than this are of another run."""
    lines = read(log)
    result = Result(part, seconds, how_it_failed(status, seconds), last(lines))
    if part.name.startswith("tests:"):
        result.tests = outcomes(lines)
        result.says = in_words(lines, result.tests)
        result.broken = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        if result.tests and not result.tests.get("passed"):
            result.failure = result.failure or "no test passed"
    elif part.benchmark and (document := figures(part.benchmark, out, began)):
        result.goals = list(document.get("goals", []))
        reached = len(result.goals) - result.missed
        result.says = f"{reached} of {len(result.goals)} goals reached" if result.goals else "measured"
    elif part.benchmark:
        result.failure = result.failure or "wrote no figures"
    return result


def how_it_failed(status: int | None, seconds: float) -> str:
    if status is None:
        return f"stopped after {seconds:.0f} s"
    return f"exit status {status}" if status > 0 else f"killed by signal {-status}" if status else ""


def last(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if line), "")


def read(log: Path) -> list[str]:
    return [COLOURS.sub("", line).strip(" =") for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])


def outcomes(lines: Sequence[str]) -> dict[str, int]:
    """Of tests, counted from pytest's ``-v``: also of a run that never came to its summary."""
    worst: dict[str, str] = {}
    for found in filter(None, map(OUTCOME.match, lines)):
        if worst.get(found["test"]) != "FAILED":
            worst[found["test"]] = found["outcome"]
    return {outcome.lower(): count for outcome, count in sorted(collections.Counter(worst.values()).items())}


def in_words(lines: Sequence[str], tests: dict[str, int]) -> str:
    """The counts, and the test that never ended, if there is one."""
    counted = ", ".join(f"{count} {outcome}" for outcome, count in tests.items()) or last(lines)
    begun = [line for line in lines if BEGUN.match(line)]
    if begun and not OUTCOME.match(begun[-1]) and (hung := BEGUN.match(begun[-1])):
        return f"{counted}; in {hung['test'].rpartition('/')[2]} when it ended"
    return counted


def figures(benchmark: str, out: Path, began: str) -> dict[str, Any]:
    """The newest of this name under ``out``; empty where there are none."""
    found = [json.loads(path.read_text(encoding="utf-8")).get(benchmark, {}) for path in out.glob("*.json")]
    return max((d for d in found if d.get("when", "") >= began), key=lambda d: d["when"], default={})


def print_table(results: Sequence[Result], logs: Path) -> None:
    print()
    for result in results:
        for goal in result.goals:
            colour, word = (GREEN, "reached") if goal["reached"] else (RED, "MISSED")
            figure = ", ".join(filter(None, [goal["measured"], goal["needed"] and f"goal {goal['needed']}"]))
            print(f"{colour}{word:8}{PLAIN}{result.part.name:10}{goal['what']}{': ' if figure else ''}{figure}")
    print(f"\n{'part':24}{'':8}{'gpu':6}{'seconds':>8}  ")
    for result in results:
        colour, word = (RED, "FAILED") if result.failure else (GREEN, "ok")
        text = ", ".join(filter(None, [result.failure, result.says]))
        print(f"{colour}{result.part.name:24}{word:8}{','.join(result.gpus):6}{result.seconds:8.0f}  {text[:WIDTH]}{PLAIN}")
        for line in result.broken[:BROKEN_SHOWN]:
            print(f"    {line[: 2 * WIDTH]}")
    counts = total(results)
    if counts:
        print(f"{'all tests':24}{'':22}  {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    if any(result.failure for result in results):
        print(f"what they printed: {logs}")


def total(results: Sequence[Result]) -> dict[str, int]:
    return dict(sorted(sum((collections.Counter(result.tests) for result in results), collections.Counter()).items()))


def write_run(results: Sequence[Result], out: Path, place: Place, command: Sequence[str], began: float) -> Path:
    """Under ``gpu_run``: what ran, for how long, with how many tests; beside the figures that it gave."""
    path = out / f"{machine.device_name(True)}.json"
    document = {
        "title": "scripts/gpu",
        "command": shlex.join(["scripts/gpu", *without_places(command)]),
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": machine.hardware(),
        "versions": {"commit": machine.commit()},
        "gpus": len(place.gpus),
        "seconds": round(time.monotonic() - began, 1),
        "tests": total(results),
        "parts": {result.part.name: result.as_dict() for result in results},
    }
    put(path, "gpu_run", document)
    return path
