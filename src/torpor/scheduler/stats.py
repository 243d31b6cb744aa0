from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Requests at this moment, and counts since the start."""

    admission_open: bool
    waiting: int
    running: int
    preempted: int  # waiting to go on
    loading: int
    cancelling: int
    handed_off: int
    steps: int
    preemptions: int
    frozen: int  # requests that a freeze sent back
    finished: int  # with a reason of their own: stop or length
    aborted: int
    failed: int  # with an error
    prompt_tokens: int  # of requests that began
    cached_tokens: int  # of those, taken from the prefix cache or from a peer
    computed_tokens: int  # run through the model, recomputation included
    generated_tokens: int
    loads_done: int
    loads_failed: int  # lost KV that was recomputed (P5), those that timed out included
    loads_timed_out: int


class Counters:
    """The counts of ``SchedulerStats``, while they run."""

    __slots__ = (
        "aborted",
        "cached_tokens",
        "computed_tokens",
        "failed",
        "finished",
        "frozen",
        "generated_tokens",
        "loads_done",
        "loads_failed",
        "loads_timed_out",
        "preemptions",
        "prompt_tokens",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = self.preemptions = self.frozen = 0
        self.finished = self.aborted = self.failed = 0
        self.prompt_tokens = self.cached_tokens = self.computed_tokens = self.generated_tokens = 0
        self.loads_done = self.loads_failed = self.loads_timed_out = 0

    def snapshot(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}
