"""``torpor demo --unfollowed``: what happens when registrations do not follow the mapping.

Each case ends as its transport makes it end: ``ipc`` with wrong tokens, HTTP 200 and memory held by the peer; ``nixl`` over TCP
with the death of the engine that sleeps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from torpor.demo.fleet import Fleet
from torpor.demo.pair import Pair, PairConfig
from torpor.demo.questions import QUESTIONS
from torpor.demo.run import DemoConfig, Phases, model_ready
from torpor.demo.tables import MIB
from torpor.errors import TorporError

CONNECTORS = {"ipc": "torpor.testing.unfollowed:UnfollowedIpc", "nixl": "torpor.testing.unfollowed:UnfollowedNixl"}
DEATH_S = 20.0


def run_unfollowed(config: DemoConfig, console: Console) -> bool:
    """True when every connector showed its fault. The engines run with connectors that exist for this alone."""
    shown = True
    cases = {"ipc": wrong_tokens, "nixl": death_of_the_sleeper}
    with model_ready(config, console, Phases()) as ready:
        for connector in ready.connectors:
            with tempfile.TemporaryDirectory(prefix="torpor-demo-") as folder, Fleet(Path(folder)) as fleet:
                shown = show_fault(fleet, ready.pair(CONNECTORS[connector]), cases[connector], console) and shown
    console.print("[bold]the fault was reproduced[/bold]" if shown else "[bold red]FAIL: the fault did not show[/bold red]")
    return shown


def show_fault(fleet: Fleet, config: PairConfig, case: Callable[[Pair, Console], bool], console: Console) -> bool:
    try:
        with console.status("starting P, D and router") as status:
            return case(Pair.start(fleet, config, status.update), console)
    except TorporError as error:
        console.print(f"[red]{escape(str(error))}[/red]\n{escape(fleet.last_words())}", highlight=False)
        return False


def wrong_tokens(pair: Pair, console: Console) -> bool:
    """P sleeps and wakes, D keeps reading the pages P had before: every answer comes with HTTP 200."""
    reference = pair.ask(QUESTIONS, at_once=1)
    gpu = GpuBytes(pair)
    report = pair.sleep(pair.prefill, 1)
    held = int(report["unmapped_bytes"]) - int(report["returned_bytes"])
    gpu.note("asleep")
    pair.wake(pair.prefill)
    gpu.note("awake again")
    # D asks afresh, in another order: its own prefix cache would hide the fault, and so would P's blocks filled as before.
    pair.sleep(pair.decode, 1)
    pair.wake(pair.decode)
    answers = pair.ask(QUESTIONS[::-1], at_once=1)[::-1]
    wrong = sum(a != b for a, b in zip(answers, reference, strict=True))
    console.print(f"ipc, not followed: {wrong}/{len(QUESTIONS)} answers wrong, all of them HTTP 200")
    console.print(f"  {held / MIB:.1f} MiB that P's sleep unmapped never came back")
    if gpu.seen:
        console.print(f"  in use on P's GPU: {gpu}")
    for tag in report["tags"]:
        for holder in tag["holders"]:
            console.print(f"  the sleep report names {holder['who']}: {holder['bytes'] / MIB:.1f} MiB of {tag['tag']}")
    return wrong > 0 and held > 0


class GpuBytes:
    """What is in use on P's GPU, by whomever, from one point to the next. Nothing on a machine where memory is the host's."""

    def __init__(self, pair: Pair) -> None:
        self.seen: list[tuple[str, int]] = []
        memory = pair.memory(pair.prefill)["memory"]
        self._ordinal = int(memory["device"]) if memory["driver"] == "cuda" else None
        self.note("awake")

    def note(self, when: str) -> None:
        if self._ordinal is not None:
            import torch

            free, total = torch.cuda.mem_get_info(self._ordinal)
            self.seen.append((when, total - free))

    def __str__(self) -> str:
        return ", ".join(f"{when} {used / MIB:.1f} MiB" for when, used in self.seen)


def death_of_the_sleeper(pair: Pair, console: Console) -> bool:
    """P hands a prefill over and sleeps; D's late read makes UCX touch the unmapped range inside P."""
    question = QUESTIONS[0]
    warm = pair.prefill_only(QUESTIONS[1])
    pair.decode_with(QUESTIONS[1], warm)
    params = pair.prefill_only(question)
    pair.sleep(pair.prefill, 1)
    answer = pair.decode_with(question, params)
    deadline = time.monotonic() + DEATH_S
    while pair.is_healthy(pair.prefill) and time.monotonic() < deadline:
        time.sleep(0.2)
    died = not pair.is_healthy(pair.prefill)
    end = pair.prefill.tail(3)
    console.print(f"nixl, not followed: a late read at the sleeping P: P {'died' if died else 'lives'}, D answered {answer!r}")
    console.print(end, highlight=False, markup=False)
    return died
