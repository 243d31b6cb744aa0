"""Ctrl-C while a native call runs: Python raises KeyboardInterrupt as soon as the call has returned, before anybody sees what it
gave."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from torpor._native import device, objects
from torpor._native.library import call

# They take no time, and change nothing.
QUICK = ("tp_device_get_stats", "tp_region_get_stats", "tp_arena_get_ahead", "tp_device_free_bytes", "tp_host_free_bytes")


class Interrupt:
    """The ``nth`` native call in the block that its thread makes (of those called ``name``, if given) is interrupted."""

    def __init__(self, nth: int = 1, name: str = "") -> None:
        self.reached = False
        self._nth, self._name = nth, name
        self._calls = 0
        self._hit = ""
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Interrupt:
        self._thread = threading.get_ident()
        for module in (device, objects):
            self._patch.setattr(module, "call", self._call)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()

    def _call(self, name: str, *arguments: Any) -> None:
        call(name, *arguments)
        if name in QUICK or self._name not in ("", name) or threading.get_ident() != self._thread:
            return
        self._calls += 1
        if self._calls == self._nth:
            self.reached, self._hit = True, name
            raise KeyboardInterrupt

    def __str__(self) -> str:
        return f"an interrupt in native call {self._nth}, {self._hit}"


def every_interrupt() -> Iterator[Interrupt]:
    """In the 1st, 2nd, ... native call, until a body makes no more."""
    for nth in itertools.count(1):
        interrupt = Interrupt(nth)
        yield interrupt
        if not interrupt.reached:
            break
