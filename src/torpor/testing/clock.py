"""A clock that stands still until it is told otherwise."""

from __future__ import annotations


class FakeClock:
    """Stands in for ``time.monotonic``: call it for the time in seconds, ``advance`` it instead of waiting."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back: {seconds}")
        self.now += seconds
