"""What the benchmarks share: what was run on which machine, medians of interleaved runs, a table on the terminal and a JSON file.

Things are compared side by side: every round runs every case once, in an order that changes from round to round, so a machine
that gets slower half way makes all of them slower. What others took of the processors meanwhile is part of the result.

Importing this puts the tree's own ``src`` first on the path: what is measured is what stands here, installed or not.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import random
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
MEASUREMENTS = ROOT / "docs" / "measurements"
PACKAGES = ("torpor", "torch", "numpy", "transformers")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")

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


# ---- the machine -----------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name))},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, str]:
    """For child processes: they import the same tree."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


class Load:
    """What everybody else took of the processors since it was made: of all cores, from 0 to 1."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._all, self._own = _busy_s(), _own_s()

    @property
    def others(self) -> float:
        elapsed = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, (_busy_s() - self._all) - (_own_s() - self._own)) / elapsed if elapsed else 0.0


def _busy_s() -> float:
    """Of all cores since boot: user, nice, system, irq, softirq and what the hypervisor stole."""
    fields = [int(x) for x in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) * TICK_S


def _own_s() -> float:
    """Of this process and its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)


# ---- what comes out --------------------------------------------------------------------------------------------------------


class Run:
    """One run of one benchmark: prints a header when it is made, and writes the file when it is done.

    >>> run = Run("engine_throughput", "Engine against transformers.generate")
    >>> run.table("batch 1", ["case", "tokens/s"], [["torpor", 31.2], ["transformers", 30.9]])
    >>> run.write({"batch_1": {"torpor": 31.2}}, goals={"batch 1": 31.2 >= 30.9})
    """

    def __init__(self, name: str, title: str, folder: str | Path = MEASUREMENTS) -> None:
        self.name = name
        self.title = title
        self._folder = Path(folder)
        self._load = Load()
        self._began = time.monotonic()
        self.header: dict[str, Any] = {
            "benchmark": name,
            "title": title,
            "command": command_line(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "machine": machine(),
            "load_average_before": round(os.getloadavg()[0], 2),
        }
        console.print(f"[bold]{title}[/bold]")
        console.print(f"{self.header['command']}\n" + ", ".join(f"{k} {v}" for k, v in self.header["machine"].items()))
        console.print(f"load average before: {self.header['load_average_before']}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """The first column is text, the others are numbers or text, right-aligned."""
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        console.print(table)

    def note(self, text: str) -> None:
        console.print(text)

    def write(self, results: Mapping[str, Any], goals: Mapping[str, bool] | None = None) -> Path:
        """``docs/measurements/<name>.json``. ``goals``: what was to be reached, and whether it was."""
        others = round(self._load.others, 3)
        seconds = round(time.monotonic() - self._began, 1)
        for goal, reached in (goals or {}).items():
            console.print(f"[{'green' if reached else 'red'}]{'reached' if reached else 'MISSED '}[/]  {goal}")
        console.print(f"others took {others:.0%} of the processors meanwhile; {seconds:.0f} s in all")
        document = {
            **self.header,
            "processors_taken_by_others": others,
            "seconds": seconds,
            "goals": dict(goals or {}),
            "results": rounded(results),
        }
        path = self._folder.resolve() / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        console.print(f"written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
        return path


def command_line() -> str:
    """As typed in the repository's root, whatever the folder is called here."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


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


def _cell(value: Any) -> str:
    if isinstance(value, Samples):
        return f"{value.median:.3g} ({value.low:.3g}-{value.high:.3g})"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def arguments(description: str | None, **defaults: int | float | str) -> argparse.Namespace:
    """Options ``--name value``, each of its default's type; ``--name`` alone where the default is False."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", help=" ", **kind)
    return parser.parse_args()
