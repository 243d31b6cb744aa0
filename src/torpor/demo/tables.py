"""What the demo prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from torpor.demo.run import Row

MIB = 1 << 20
CAPTION = (
    "same: answers equal to the reference, byte for byte; pulled: D's reads of P's KV for them; in MiB: resident while awake, "
    "unmapped by the sleep, back with the kernel for certain, held by somebody else; sleep and wake in milliseconds"
)


def show_answers(console: Console, questions: Sequence[str], answers: Sequence[str]) -> None:
    table = Table(title="reference answers", show_lines=False)
    table.add_column("asked")
    table.add_column("answered", overflow="fold")
    for question, answer in zip(questions, answers, strict=True):
        table.add_row(question, " ".join(answer.split()))
    console.print(table)


def show_rows(console: Console, connector: str, rows: Sequence[Row]) -> None:
    table = Table(title=f"sleep and wake over {connector}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.caption, table.caption_justify = CAPTION, "left"
    for name in ("asleep", "cycle", "level", "same", "pulled", "awake", "unmapped", "back", "held", "sleep", "wake"):
        table.add_column(name, justify="left" if name == "asleep" else "right", no_wrap=True)
    for row in rows:
        amounts = (row.resident_bytes, row.unmapped_bytes, row.returned_bytes, row.held_bytes)
        table.add_row(
            row.who,
            str(row.cycle),
            str(row.level),
            f"{row.identical}/{row.asked}",
            str(row.pulls),
            *(f"{amount / MIB:.1f}" for amount in amounts),
            f"{row.sleep_ms:.0f}",
            f"{row.wake_ms:.0f}",
            style=None if row.passed else "bold red",
        )
    console.print(table)


def show_phases(console: Console, seconds: Mapping[str, float], total_s: float) -> None:
    table = Table(title="where the time went")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.1f}")
    table.add_row("all", f"{total_s:.1f}", style="bold")
    console.print(table)
