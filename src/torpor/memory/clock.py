"""Seconds per phase of a transaction."""

from __future__ import annotations

import contextlib
import threading
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


class Waits:
    """``with waits: ...`` on any threads: how long anybody waited, several at once counting once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._began = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._waiting == 0:
                self._began = time.perf_counter()
            self._waiting += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting == 0:
                self.seconds += time.perf_counter() - self._began
