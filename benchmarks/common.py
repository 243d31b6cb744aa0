"""What the benchmarks share: what was run on which machine, medians of interleaved runs, a table on the terminal and a JSON file.

Things are compared side by side: every round runs every case once, in an order that changes from round to round, so a machine
that gets slower half way makes all of them slower. What others took of the processors meanwhile is part of the result.

Importing this puts the tree's own ``src`` first on the path: what is measured is what stands here, installed or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import document
import machine
from machine import ROOT
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(ROOT / "src"))
MEASUREMENTS = ROOT / "docs" / "measurements"

console = Console(width=140 if not sys.stdout.isatty() else None, highlight=False)


# ---- values ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """What one case gave, one value per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def spread(self) -> float:
        """(highest - lowest) / median: how far to trust the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.low, "max": self.high, "values": list(self.values)}


def scaled(samples: Samples, factor: float) -> Samples:
    """In another unit."""
    return Samples(tuple(factor * value for value in samples.values))


Case = Callable[[], "float | None"]
"""Runs once. Gives the value that counts, or None: the wall time of the call, in seconds, is the value."""


def interleaved(cases: Mapping[str, Case], rounds: int, *, warmup: int = 1, seed: int = 0) -> dict[str, Samples]:
    """Runs every case once per round, in an order shuffled by ``seed``; the first ``warmup`` rounds do not count."""
    order, generator = list(cases), random.Random(seed)
    values: dict[str, list[float]] = {name: [] for name in cases}
    for index in range(warmup + rounds):
        generator.shuffle(order)
        for name in order:
            value = timed(cases[name])
            if index >= warmup:
                values[name].append(value)
    return {name: Samples(tuple(v)) for name, v in values.items()}


def timed(case: Case) -> float:
    """Garbage is collected before, not during, the run."""
    gc.collect()
    began = time.perf_counter()
    value = case()
    took = time.perf_counter() - began
    return took if value is None else value


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every key over dicts, such as phases of repeated runs. A missing key counts as 0."""
    keys = dict.fromkeys(key for one in rounds for key in one)
    return {key: statistics.median(one.get(key, 0.0) for one in rounds) for key in keys}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y)."""
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def environment() -> dict[str, str]:
    """For child processes: they import the same tree."""
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


# ---- what comes out --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What was to be reached. Texts are with their units, as they are shown."""

    what: str
    measured: str = ""
    needed: str = ""
    reached: bool

    def __str__(self) -> str:
        figures = [self.measured, f"goal {self.needed}" if self.needed else ""]
        return ": ".join([self.what, ", ".join(filter(None, figures))] if any(figures) else [self.what])


class Run:
    """One run of one benchmark: prints a header when it is made, and writes the file when it is done.

    >>> run = Run("engine_throughput", "Engine against transformers.generate")
    >>> run.table("batch 1", ["case", "tokens/s"], [["torpor", 31.2], ["transformers", 30.9]])
    >>> run.write({"batch_1": {"torpor": 31.2}}, [Goal(what="batch 1", measured="31.2", needed="30.9", reached=True)])
    """

    def __init__(self, name: str, title: str, folder: str | Path = MEASUREMENTS, gpu: bool | None = None) -> None:
        """``gpu``: whether the figures are a GPU's, which names the file; None: when the name begins with ``gpu_``."""
        self.name = name
        self.title = title
        self.device = machine.device_name(name.startswith("gpu_") if gpu is None else gpu)
        self._folder = Path(folder)
        self._load = machine.Load()
        self._began = time.monotonic()
        self._rows: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {
            "title": title,
            "command": command_line(),
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "load_average_before": round(os.getloadavg()[0], 2),
        }
        console.print(f"[bold]{title}[/bold]")
        shown = {**self.header["hardware"], **self.header["versions"]}
        console.print(f"{self.header['command']}\n" + ", ".join(f"{k} {v}" for k, v in shown.items()))
        console.print(f"load average before: {self.header['load_average_before']}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """The first column is text, the others are numbers or text, right-aligned. Its rows are in the file too."""
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*map(cell, row))
            self._rows.append({"table": title, **dict(zip((column or "what" for column in columns), row, strict=True))})
        console.print(table)

    def note(self, text: str) -> None:
        console.print(text)

    def write(self, results: Mapping[str, Any], goals: Mapping[str, bool] | Sequence[Goal] = ()) -> Path:
        """Into ``<device>.json``, in the place of this benchmark's last run; other benchmarks' runs stay.

        ``goals``: what was to be reached, and whether it was.
        """
        if isinstance(goals, Mapping):
            goals = [Goal(what=text, reached=reached) for text, reached in goals.items()]
        others = round(self._load.others, 3)
        seconds = round(time.monotonic() - self._began, 1)
        for goal in goals:
            console.print(f"[{'green' if goal.reached else 'red'}]{'reached' if goal.reached else 'MISSED '}[/]  {goal}")
        console.print(f"others took {others:.0%} of the processors meanwhile; {seconds:.0f} s in all")
        entry = {
            **self.header,
            "processors_taken_by_others": others,
            "seconds": seconds,
            "rows": rounded(self._rows),
            "goals": [dataclasses.asdict(goal) for goal in goals],
            "results": rounded(results),
        }
        path = self._folder.resolve() / f"{self.device}.json"
        document.put(path, self.name, entry)
        console.print(f"written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
        return path


def command_line() -> str:
    """As typed in the repository's root, whatever the folder is called here; without where the file goes."""
    return shlex.join(["python", *document.without_places([sys.argv[0], *sys.argv[1:]])])


def rounded(value: Any, digits: int = 5) -> Any:
    """Numbers to so many significant digits, Samples as dicts, inside dicts and lists; what JSON is given."""
    if isinstance(value, Samples):
        return rounded(value.as_dict(), digits)
    if isinstance(value, Mapping):
        return {str(k): rounded(v, digits) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value


def cell(value: Any) -> str:
    if isinstance(value, Samples):
        return f"{value.median:.3g} ({value.low:.3g}-{value.high:.3g})"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def arguments(description: str | None, **defaults: int | float | str) -> argparse.Namespace:
    """Options ``--name value``, each of its default's type; ``--name`` alone where the default is False.

    ``--quick`` and ``--out`` are always among them: scripts/gpu gives every benchmark both.
    """
    defaults = {"quick": False, "out": str(MEASUREMENTS), **defaults}
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", help=" ", **kind)
    return parser.parse_args()
