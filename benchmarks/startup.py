"""How long ``torpor serve`` takes from its start to its first token, and where the time goes.

    .venv/bin/python benchmarks/startup.py
    .venv/bin/python benchmarks/startup.py --quick --model FOLDER

    warm       the model was converted before: what every start but the first one is
    cold       an empty --cache-dir: a GGUF model is converted first. A folder of safetensors has no such difference

Times are wall times from outside: a process is started, its progress lines are read as they come, /ready is asked every 20 ms,
then one token is. ``torpor --help`` and the heaviest imports, each alone in a fresh interpreter, are beside them.
"""

from __future__ import annotations

import dataclasses
import itertools
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common
import httpx

from torpor.demo.fleet import free_port

READY_S = 180.0
POLL_S = 0.02
IMPORTS = (
    "torch",
    "transformers:AutoTokenizer",
    "transformers:AutoModelForCausalLM",
    "torpor.engine.worker",
    "torpor.server.app",
)
GOAL_HELP_S = 1.0


@dataclass
class Start:
    """One start: when what was said, in seconds from the beginning."""

    marks: list[tuple[str, float]]
    ready_s: float
    first_token_s: float
    cpu_s: float = 0.0  # of all its processes, its end included

    def phases(self) -> dict[str, float]:
        """The time from each mark to the next; before the first one, two interpreters start and the core imports."""
        begun = [("processes and imports", 0.0), *self.marks]
        ends = [*(at for _, at in self.marks), self.ready_s]
        found: dict[str, float] = {}
        for (name, at), end in zip(begun, ends, strict=True):
            found[name] = found.get(name, 0.0) + max(0.0, end - at)
        return {**found, "first token": self.first_token_s - self.ready_s}


class Server:
    """``torpor serve`` in a process of its own, timed."""

    def __init__(self, model: str, arguments: tuple[str, ...]) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-u", "-m", "torpor", "serve", model, "--port", self._url.rpartition(":")[2], *arguments]
        self._began = time.perf_counter()
        environment = {**common.environment(), "TERM": "dumb"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._lines: list[tuple[str, float]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append((line.strip(), self._elapsed()))

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def start(self) -> Start:
        with httpx.Client(timeout=60) as http:
            self._wait_ready(http)
            ready_s = self._elapsed()
            body = {"model": http.get(f"{self._url}/v1/models").json()["data"][0]["id"], "prompt": "Hello", "max_tokens": 1}
            http.post(f"{self._url}/v1/completions", json=body).raise_for_status()
            first_token_s = self._elapsed()
        return Start(self._marks(ready_s), ready_s, first_token_s)

    def _wait_ready(self, http: httpx.Client) -> None:
        while self._elapsed() < READY_S:
            if self._process.poll() is not None:
                raise SystemExit("the server ended:\n" + "\n".join(line for line, _ in self._lines))
            try:
                if http.get(f"{self._url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        raise SystemExit(f"the server was not ready after {READY_S:g} s")

    def _marks(self, ready_s: float) -> list[tuple[str, float]]:
        """Progress lines, without their percentages; a phase counts from its first line."""
        said = [(line.rstrip("0123456789% "), at) for line, at in self._lines if at <= ready_s]
        phases = [(line, at) for line, at in said if line and line[0].islower() and not line.startswith("torpor serves")]
        return [next(group) for _, group in itertools.groupby(phases, key=lambda mark: mark[0])]


def start_once(model: str, arguments: tuple[str, ...]) -> Start:
    before = children_cpu_s()
    with Server(model, arguments) as server:
        start = server.start()
    return dataclasses.replace(start, cpu_s=children_cpu_s() - before)


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def started(model: str, arguments: tuple[str, ...], found: list[Start], cold: bool) -> float:
    if not cold:
        found.append(start_once(model, arguments))
    else:
        with tempfile.TemporaryDirectory(prefix="torpor-bench-") as folder:
            found.append(start_once(model, (*arguments, "--cache-dir", folder)))
    return found[-1].first_token_s


def command_s(*command: str) -> Callable[[], None]:
    def run() -> None:
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=common.environment())

    return run


def import_command(name: str) -> Callable[[], None]:
    module, _, attribute = name.partition(":")
    return command_s("-c", f"from {module} import {attribute}" if attribute else f"import {module}")


def show_starts(run: common.Run, starts: dict[str, list[Start]]) -> dict[str, dict[str, float]]:
    phases = {name: common.medians([s.phases() for s in found]) for name, found in starts.items()}
    names = list(dict.fromkeys(phase for found in phases.values() for phase in found))
    rows = [[name, *(phases[case].get(name, "") for case in starts)] for name in names]
    run.table("where the time goes, seconds (medians)", ["", *starts], rows)
    return phases


def main() -> None:
    options = common.arguments(__doc__, model="builtin:smollm2-135m", rounds=3, threads=1)
    run = common.Run("startup", f"torpor serve {Path(options.model).name}: from the start to the first token", options.out)
    arguments = ("--threads", str(options.threads), "--kv-cache-bytes", "64MiB")
    rounds, warmup = (1, 0) if options.quick else (options.rounds, 1)
    cases = ("warm",) if options.quick else ("warm", "cold")
    starts: dict[str, list[Start]] = {name: [] for name in cases}
    measured = common.interleaved(
        {name: lambda name=name: started(options.model, arguments, starts[name], name == "cold") for name in cases},  # type: ignore[misc]
        rounds,
        warmup=warmup,
    )
    starts = {name: found[warmup:] for name, found in starts.items()}
    ready = {name: common.Samples(tuple(s.ready_s for s in found)) for name, found in starts.items()}
    cpu = {name: common.Samples(tuple(s.cpu_s for s in found)) for name, found in starts.items()}
    rows = [[name, ready[name], measured[name], cpu[name]] for name in cases]
    run.table("seconds", ["", "to ready", "to the first token", "of processor time"], rows)
    phases = show_starts(run, starts)
    alone: dict[str, common.Case] = {"torpor --help": command_s("-m", "torpor", "--help")}
    if not options.quick:
        alone |= {f"import {name}": import_command(name) for name in IMPORTS}
    commands = common.interleaved(alone, rounds, warmup=warmup)
    run.table("alone in a fresh interpreter, seconds", ["", "seconds"], [[name, samples] for name, samples in commands.items()])
    help_s = commands["torpor --help"].median
    run.write(
        {"to_ready_s": ready, "to_first_token_s": measured, "cpu_s": cpu, "phases_s": phases, "alone_s": commands},
        {f"torpor --help: {help_s:.2f} s, goal {GOAL_HELP_S:g}": help_s < GOAL_HELP_S},
    )


if __name__ == "__main__":
    main()
