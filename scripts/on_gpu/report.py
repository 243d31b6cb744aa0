"""What a part came to, and the table at the end."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts import Part

RED, GREEN, PLAIN = ("\033[31m", "\033[32m", "\033[0m") if sys.stdout.isatty() or "FORCE_COLOR" in os.environ else ("",) * 3
COLOURS = re.compile(r"\033\[[0-9;]*m")
WIDTH = 110


@dataclass
class Result:
    """``failure``: empty when the part ran to its end and exited with 0."""

    part: Part
    seconds: float
    failure: str
    says: str = ""
    goals: list[dict[str, Any]] = field(default_factory=list)

    @property
    def missed(self) -> int:
        return sum(not goal["reached"] for goal in self.goals)


def result_of(part: Part, seconds: float, status: int | None, log: Path, out: Path, began: str) -> Result:
    """``status``: None when it was stopped at its limit. ``began``: figures older than this are of another run."""
    lines = [COLOURS.sub("", line).strip(" =") for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    if status == 0:
        document = figures(part.benchmark, out, began)
        result = Result(part, seconds, "", last, list(document.get("goals", [])))
        if part.benchmark and not document:
            result.failure = "wrote no figures"
        elif result.goals:
            result.says = f"{len(result.goals) - result.missed} of {len(result.goals)} goals reached"
        elif part.benchmark:
            result.says = "measured"
        return result
    return Result(part, seconds, f"stopped after {part.limit_s:.0f} s" if status is None else f"exit status {status}", last)


def figures(benchmark: str, out: Path, began: str) -> dict[str, Any]:
    """The newest of this name under ``out``; empty where there are none."""
    found = [json.loads(path.read_text(encoding="utf-8")).get(benchmark, {}) for path in out.glob("*.json")]
    return max((d for d in found if d.get("when", "") >= began), key=lambda d: d["when"], default={})


def print_table(results: Sequence[Result], logs: Path) -> None:
    for result in results:
        for goal in result.goals:
            colour, word = (GREEN, "reached") if goal["reached"] else (RED, "MISSED")
            figure = ", ".join(filter(None, [goal["measured"], goal["needed"] and f"goal {goal['needed']}"]))
            print(f"{colour}{word:8}{PLAIN}{result.part.name:10}{goal['what']}{': ' if figure else ''}{figure}")
    print(f"\n{'part':12}{'':8}{'seconds':>8}  ")
    for result in results:
        colour, word = (RED, "FAILED") if result.failure else (GREEN, "ok")
        text = ", ".join(filter(None, [result.failure, result.says]))
        print(f"{colour}{result.part.name:12}{word:8}{result.seconds:8.0f}  {text[:WIDTH]}{PLAIN}")
    if any(result.failure for result in results):
        print(f"what they printed: {logs}")
