"""A core that hangs is told from one that computes for long, and from a client that was stopped itself."""

from __future__ import annotations

from torpor.engine.pulse import Pulse


class Core:
    """With its client's clock. ``hears``: it answers what it is asked."""

    def __init__(self) -> None:
        self.now = 100.0
        self.worked: float | None = 5.0
        self.hears = True
        self.asked = 0
        self.pulse = Pulse(self.ask, lambda: self.worked, lambda: self.now)

    def ask(self) -> None:
        self.asked += 1
        if self.hears:
            self.pulse.answered()

    def look(self, times: int, interval_s: float = 0.5, works_s: float = 0.0) -> float:
        """What the last of so many looks says; the core works ``works_s`` between two."""
        silent_s = 0.0
        for _ in range(times):
            silent_s = self.pulse.silent_s()
            self.now += interval_s
            if self.worked is not None:
                self.worked += works_s
        return silent_s


def test_a_core_that_answers_is_never_silent_and_asked_each_time() -> None:
    core = Core()
    assert core.look(20) == 0
    assert core.asked == 20


def test_a_core_that_neither_answers_nor_computes_is_silent() -> None:
    core = Core()
    core.hears = False
    assert core.look(21) == 10.0
    assert core.asked == 1, "one question at a time"
    core.pulse.answered()
    core.hears = True
    assert core.look(2) == 0


def test_a_long_step_is_no_silence_but_a_heartbeat_thread_is_no_work() -> None:
    core = Core()
    core.hears = False
    assert core.look(200, works_s=0.4) == 0
    assert core.look(21, works_s=0.01) > 9


def test_without_processor_time_only_answers_count() -> None:
    core = Core()
    core.worked, core.hears = None, False
    assert core.look(21) == 10.0


def test_a_client_that_was_stopped_does_not_blame_the_core() -> None:
    core = Core()
    core.hears = False
    core.look(2)
    core.now += 3600
    assert core.look(1) < 2.5
