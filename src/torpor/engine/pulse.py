"""Whether the core's loop still turns.

Time alone cannot tell a core that hangs from one in a long step, but the processor time it uses can: a core that does not answer
and computes nothing is stopped, or waits for something that never comes.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_GAP_S = 1.0  # a longer time between two looks is ours, not the core's: this process was stopped, or its loop was busy
BUSY_SHARE = 0.1  # of one processor: less is a heartbeat thread, more is a step


class Pulse:
    """Used by one thread. ``ask`` sends a question that ``answered`` ends; ``worked_s`` is the processor time of the core so far,
    None where it is not known."""

    def __init__(self, ask: Callable[[], None], worked_s: Callable[[], float | None], clock: Callable[[], float]) -> None:
        self._ask = ask
        self._worked_s = worked_s
        self._clock = clock
        self._asked = False
        self._looked = clock()
        self._silent_s = 0.0
        self._last_worked_s: float | None = None

    def answered(self) -> None:
        self._asked = False
        self._silent_s = 0.0

    def silent_s(self) -> float:
        """How long the core has neither answered nor computed, as far as regular looks at it have shown. Asks, if nothing is
        asked yet; never blocks."""
        now = self._clock()
        gap = min(now - self._looked, MAX_GAP_S)
        worked, before = self._worked_s(), self._last_worked_s
        if not self._asked:
            self._asked = True
            self._silent_s = 0.0
            self._ask()
        elif worked is not None and before is not None and worked - before > BUSY_SHARE * (now - self._looked):
            self._silent_s = 0.0
        else:
            self._silent_s += gap
        self._looked, self._last_worked_s = now, worked
        return self._silent_s
