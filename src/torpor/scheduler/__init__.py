"""Continuous batching with chunked prefill, preemption by recompute, and KV from peers. Imports no torch."""

from torpor.scheduler.base import SchedulerConnector
from torpor.scheduler.config import SchedulerConfig
from torpor.scheduler.output import RunnerOutput, ScheduledSequence, SchedulerOutput
from torpor.scheduler.scheduler import Scheduler
from torpor.scheduler.sequence import RequestState
from torpor.scheduler.stats import SchedulerStats

__all__ = [
    "RequestState",
    "RunnerOutput",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerConnector",
    "SchedulerOutput",
    "SchedulerStats",
]
