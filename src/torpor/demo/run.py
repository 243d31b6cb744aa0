"""The demo's plan: reference answers, sleeps of D, P and both at two levels, and the verdict.

Results are data; tables.py shows them.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from torpor.demo.fleet import Fleet, Service
from torpor.demo.pair import Pair, PairConfig
from torpor.demo.questions import QUESTIONS
from torpor.demo.random_model import RANDOM, RANDOM_8B, save_random_8b, save_random_model
from torpor.demo.tables import show_answers, show_phases, show_rows
from torpor.errors import TorporError

LARGE: dict[str, Any] = {
    "kv_cache_bytes": "8GiB",
    "dtype": "bfloat16",
    "flags": ("--load-format", "random", "--deterministic"),
}


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    connectors: tuple[str, ...] = ("ipc", "nixl")
    cycles: int = 2
    model: str = PairConfig.model  # or RANDOM, or RANDOM_8B
    max_tokens: int = 16
    memory_driver: str = PairConfig.memory_driver
    results_file: Path | None = None  # where they go as JSON
    large: bool = False  # drawn at load, in bf16: only batch-independent kernels give the same answers to the byte there

    def pair(self, connector: str) -> PairConfig:
        """On one GPU each where there are two: then blocks cross the link between them."""
        import torch

        devices = (0, 1) if self.memory_driver != "host" and torch.cuda.device_count() > 1 else (0, 0)
        return PairConfig(
            connector=connector,
            model=self.model,
            max_tokens=self.max_tokens,
            memory_driver=self.memory_driver,
            devices=devices,
            **(LARGE if self.large else {}),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sleep and wake of one or two engines; bytes are sums over them, milliseconds the longest."""

    who: str
    cycle: int
    level: int
    identical: int
    asked: int
    resident_bytes: int
    unmapped_bytes: int
    returned_bytes: int
    held_bytes: int
    sleep_ms: float
    wake_ms: float
    pulls: int  # D's reads of P's KV for these answers: without any they say nothing about P

    @property
    def passed(self) -> bool:
        return self.identical == self.asked and self.held_bytes == 0 and self.unmapped_bytes > 0 and self.pulls > 0

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


@dataclass
class Phases:
    """How long each part took, for the table at the end."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def sleep_plan(cycles: int) -> list[tuple[str, int, int]]:
    """(who, cycle, level): D, P and both, ``cycles`` times each at level 1, then both once at level 2."""
    plan = [(who, cycle, 1) for who in ("D", "P", "D+P") for cycle in range(1, cycles + 1)]
    return [*plan, ("D+P", 1, 2)]


def resident_bytes(memory: dict[str, Any]) -> int:
    return sum(int(tag["resident_bytes"]) for tag in memory["memory"]["tags"])


def sleep_once(pair: Pair, who: str, cycle: int, level: int, reference: list[str]) -> Row:
    services: list[Service] = [s for s in (pair.decode, pair.prefill) if s.name in who.split("+")]
    resident = sum(resident_bytes(pair.memory(s)) for s in services)
    slept = [pair.sleep(s, level) for s in services]
    woken = [pair.wake(s) for s in services]
    pair.wait_routed()
    pulls = pair.pulls()
    answers = pair.ask(QUESTIONS)
    return Row(
        who=who,
        cycle=cycle,
        level=level,
        identical=sum(a.encode() == b.encode() for a, b in zip(answers, reference, strict=True)),
        asked=len(reference),
        resident_bytes=resident,
        unmapped_bytes=sum(int(r["unmapped_bytes"]) for r in slept),
        returned_bytes=sum(int(r["returned_bytes"]) for r in slept),
        held_bytes=sum(int(r["unmapped_bytes"]) - int(r["returned_bytes"]) for r in slept),
        sleep_ms=1000 * max(float(r["seconds"]) for r in slept),
        wake_ms=1000 * max(float(r["seconds"]) for r in woken),
        pulls=pair.pulls() - pulls,
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one connector. ``error``: why there are fewer rows than planned."""

    connector: str
    rows: tuple[Row, ...] = ()
    pulls: int = 0  # D's reads of P's KV, those of the reference among them
    path: str = ""  # what they went over
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and bool(self.rows) and all(row.passed for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rows": [row.as_dict() for row in self.rows], "passed": self.passed}


def run_connector(connector: str, config: DemoConfig, console: Console, phases: Phases) -> Outcome:
    """One pair from start to stop."""
    with tempfile.TemporaryDirectory(prefix="torpor-demo-") as folder, Fleet(Path(folder)) as fleet:
        try:
            rows, pulled = run_pair(fleet, config.pair(connector), config.cycles, console, phases)
        except (TorporError, httpx.TransportError) as error:
            console.print(f"[red]{connector}: {escape(str(error))}[/red]\n{escape(fleet.last_words())}", highlight=False)
            return Outcome(connector=connector, error=str(error))
    outcome = Outcome(connector=connector, rows=tuple(rows), pulls=int(pulled["loads_done"]), path=str(pulled["path"]))
    show_rows(console, connector, rows)
    console.print(f"{connector}: D pulled KV from P {outcome.pulls} times over {outcome.path}")
    return outcome


def run_pair(fleet: Fleet, config: PairConfig, cycles: int, console: Console, phases: Phases) -> tuple[list[Row], dict[str, Any]]:
    """The rows, and D's connector as it says it is at the end."""
    name = config.connector
    with phases.timed(f"{name}: start P, D and router"), console.status(f"{name}: starting P, D and router") as status:
        pair = Pair.start(fleet, config, status.update)
    with phases.timed(f"{name}: reference answers"), console.status(f"{name}: asking {len(QUESTIONS)} questions for reference"):
        reference = pair.ask(QUESTIONS)
    show_answers(console, QUESTIONS, reference)
    rows = []
    for who, cycle, level in sleep_plan(cycles):
        with phases.timed(f"{name}: sleep, wake, ask again"), console.status(f"{name}: {who} sleeps at level {level}"):
            rows.append(sleep_once(pair, who, cycle, level, reference))
    return rows, dict(pair.memory(pair.decode)["connector"])


def run_demo(config: DemoConfig, console: Console) -> bool:
    """Runs the demo for every connector and prints PASS or FAIL. True when everything passed; errors are shown, not raised."""
    phases = Phases()
    started = time.monotonic()
    with model_ready(config, console, phases) as ready:
        outcomes = [run_connector(connector, ready, console, phases) for connector in ready.connectors]
    seconds = time.monotonic() - started
    show_phases(console, phases.seconds, seconds)
    if config.results_file is not None:
        results = {"connectors": [o.as_dict() for o in outcomes], "phases_s": phases.seconds, "seconds": seconds}
        config.results_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    passed = all(outcome.passed for outcome in outcomes)
    console.print("[bold green]PASS[/bold green]" if passed else "[bold red]FAIL[/bold red]")
    return passed


@contextmanager
def model_ready(config: DemoConfig, console: Console, phases: Phases) -> Iterator[DemoConfig]:
    """The configuration with a model that two engines can load at once: made in a folder of its own, or converted."""
    with tempfile.TemporaryDirectory(prefix="torpor-demo-model-") as folder:
        with phases.timed("model: made, found or converted"):
            if config.model == RANDOM:
                config = dataclasses.replace(config, model=str(save_random_model(Path(folder) / RANDOM)))
            elif config.model == RANDOM_8B:
                config = dataclasses.replace(config, model=str(save_random_8b(Path(folder) / "qwen3-8b-random")), large=True)
            else:
                prepare_model(config.model, console)
        yield config


def prepare_model(source: str, console: Console) -> None:
    """Converts a GGUF before two engines would wait for each other to do it."""
    from torpor.models import ModelConfig, resolve_model

    with console.status(f"model {source}") as status:
        resolve_model(ModelConfig(source=source), lambda phase, done: status.update(f"{phase} {done:.0%}"))
