"""Seconds per phase of a transaction."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Phases:
    """``with phases("copy"): ...`` adds to what the phase has taken so far."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.seconds_of: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_of[name] = self.seconds_of.get(name, 0.0) + time.perf_counter() - began

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began
