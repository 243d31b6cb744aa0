"""Fault points: which driver calls a piece of work makes, which of them fail, and how many were tried."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torpor._native import Device, Op

FOR_EVER = 10_000
FULL = os.environ.get("TORPOR_FAULTS") in ("all", "every pair")
EVERY_PAIR = os.environ.get("TORPOR_FAULTS") == "every pair"
SEED = int(os.environ.get("TORPOR_FAULTS_SEED", "20"))
tried = Counter[str]()
"""Points that struck, by table. Printed at the end of the run."""


@dataclass(frozen=True)
class Point:
    """The ``nth`` call of ``op`` from now on fails, and so do the ``count - 1`` after it."""

    op: Op
    nth: int
    count: int = 1

    def __str__(self) -> str:
        times = "" if self.count == 1 else " and on" if self.count == FOR_EVER else f"+{self.count - 1}"
        return f"{self.op.name.lower()}#{self.nth}{times}"


class Armed:
    """Which of the points were reached, known once the block is left."""

    def __init__(self, device: Device, points: Sequence[Point]) -> None:
        self._device = device
        self._points = points
        self._before = {p.op: device.fault_calls(p.op) for p in points}
        self.reached: tuple[bool, ...] = ()

    @property
    def all_reached(self) -> bool:
        return all(self.reached)

    def note(self) -> None:
        self.reached = tuple(self._device.fault_calls(p.op) - self._before[p.op] >= p.nth for p in self._points)


@contextlib.contextmanager
def armed(device: Device, *points: Point) -> Iterator[Armed]:
    arms = Armed(device, points)
    for point in points:
        device.arm_fault(point.op, point.nth, point.count)
    try:
        yield arms
    finally:
        device.clear_faults()
        arms.note()


def calls_of(device: Device, work: Callable[[], object]) -> dict[Op, int]:
    """How often ``work`` calls the driver, by operation; those it does not call are left out."""
    before = {op: device.fault_calls(op) for op in Op}
    work()
    return {op: made for op in Op if (made := device.fault_calls(op) - before[op])}


def singles(calls: dict[Op, int], count: int = 1) -> list[Point]:
    return [Point(op, nth, count) for op, made in calls.items() for nth in range(1, made + 1)]


def share(points: Sequence[Point], budget: int, table: str, *, bounded: bool = False) -> list[Point]:
    """All of them in a full run (unless ``bounded``), else ``budget`` of them at random, the same for the same seed."""
    if (FULL and not bounded) or len(points) <= budget:
        return list(points)
    return sorted(random.Random(f"{SEED} {table}").sample(points, budget), key=lambda p: (p.op, p.nth, p.count))
