"""Continuous batching: which tokens of which requests are computed next.

One step is ``schedule``, the runner, ``update``, in turn. A step holds the decodes first, then the rest of prompts that are
under way, then requests that begin or go on; all of it oldest first, within ``max_num_batched_tokens``.

A request begins when there are blocks for all the tokens it knows, so only decodes ever need another block. When there is none,
the youngest running request gives its blocks back and is computed again later (prompt and outputs; its full blocks may still be
in the prefix cache). The oldest always gets on, and alone it always fits: that was checked when it was added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torpor.errors import CapacityError, RequestError, StateError
from torpor.kvcache.manager import KVCacheManager
from torpor.request import EngineOutput, GenerationRequest
from torpor.scheduler.admission import check_request, seeded
from torpor.scheduler.base import SchedulerConnector
from torpor.scheduler.config import SchedulerConfig
from torpor.scheduler.integrity import check_integrity
from torpor.scheduler.outcome import Outcome
from torpor.scheduler.output import RunnerOutput, ScheduledSequence, SchedulerOutput
from torpor.scheduler.planner import Planner
from torpor.scheduler.queues import RequestQueues
from torpor.scheduler.sequence import ANSWERED, RequestState, Sequence
from torpor.scheduler.stats import Counters, SchedulerStats
from torpor.scheduler.transfers import Transfers


class Scheduler:
    """Not thread-safe; belongs to the engine's loop thread. No method blocks.

    The context is ``max_model_len`` or what the whole KV cache holds, whichever is smaller; a request that fills it ends with
    LENGTH.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        connector: SchedulerConnector | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self.context_len = min(max_model_len, kv.capacity_tokens)
        self._connector = connector
        self._queues = RequestQueues()
        self._counters = Counters()
        self._transfers = Transfers(kv, self._queues, self._counters, connector, config.remote_kv_timeout_s, clock)
        self._planner = Planner(config, kv, self._queues, self._counters, self._transfers)
        self._outcome = Outcome(kv, self._queues, self._counters, self._transfers, self._planner, self.context_len)
        self._open = True
        self._num_added = 0
        self._step_number = 0
        self._in_flight: SchedulerOutput | None = None

    # Requests come and go

    def add(self, request: GenerationRequest) -> None:
        """Queue a request, also while admission is closed. RequestError for one that can never be computed, or whose id is in
        use; CapacityError when ``max_waiting`` requests wait already."""
        if request.request_id in self._queues.by_id:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        check_request(request, self.kv, self.max_model_len, self._connector)
        if self.num_waiting >= self.config.max_waiting:
            raise CapacityError(
                f"{self.num_waiting} requests wait already: retry later, or raise max_waiting ({self.config.max_waiting})"
            )
        self._queues.enter(Sequence(request, seeded(request.sampling), self._num_added))
        self._num_added += 1

    def abort(self, request_ids: Iterable[str], error: BaseException | None = None) -> list[EngineOutput]:
        """End requests, in whatever state they are. Ids that are unknown or answered already are passed over. The outputs say
        ABORT, or with ``error`` ERROR. Blocks are freed now; those of a load in flight when the connector says that nothing
        writes to them."""
        outputs = []
        for request_id in list(request_ids):
            seq = self._queues.by_id.get(request_id)
            if seq is not None and seq.state not in ANSWERED:
                outputs.append(self._outcome.end(seq, error))
        return outputs

    # A step

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can run and the connector has nothing to say. With None and ``has_transfers``,
        the worker is to be given an ``empty_step`` now and then, for what its connector reports.

        The lists in the output are the scheduler's own: good until ``update``, and not to be changed. When the step before was
        never updated (the runner failed), its sequences are simply scheduled again.
        """
        self._abandon_step()
        self._transfers.expire()
        sequences = self._planner.plan(self._step_number, admit=self._open)
        metadata = self._transfers.metadata()
        if not sequences and metadata is None:
            return None
        return self._output(sequences, metadata)

    def empty_step(self) -> SchedulerOutput:
        """A step that computes nothing: for the connector's sake, also while a drain must not let requests go on."""
        self._abandon_step()
        self._transfers.expire()
        return self._output([], self._transfers.metadata())

    def update(self, output: SchedulerOutput, result: RunnerOutput) -> list[EngineOutput]:
        """Take the result of a step: new tokens, ends, and what the connector reported. Sequences that were aborted, frozen or
        scheduled again in the meantime are passed over. BugError when a token is missing."""
        self._in_flight = None
        return self._outcome.take(output, result)

    def _output(self, sequences: list[ScheduledSequence], metadata: object) -> SchedulerOutput:
        output = SchedulerOutput(
            step=self._step_number,
            sequences=sequences,
            connector_metadata=metadata,
            finished_request_ids=self._queues.pop_answered(),
        )
        self._step_number += 1
        self._in_flight = output
        return output

    def _abandon_step(self) -> None:
        if self._in_flight is not None:
            self._outcome.abandon(self._in_flight)
            self._in_flight = None

    # For sleep and wake

    def close_admission(self) -> None:
        """Waiting requests stay where they are, and so do new ones. Those that have begun go on to their end, preempted ones
        included."""
        self._open = False

    def open_admission(self) -> None:
        self._open = True

    def cancel_loads(self) -> list[str]:
        """Ask the connector to stop every load. The requests run (and compute what did not arrive) or end, whichever they were
        about to, as soon as it confirms; step on until ``has_loading`` is false. Returns whom that waits for."""
        for seq in self._queues.loading.values():
            self._transfers.cancel(seq)
        return [*self._queues.loading, *self._queues.cancelling]

    def freeze(self) -> None:
        """Every request that has begun gives its blocks back and goes, in order of arrival, to the front of the waiting ones;
        it is computed again from its tokens and its seed, so its text goes on as if nothing had happened. StateError while a
        load is in flight."""
        if self.has_loading:
            raise StateError(
                "requests cannot freeze while KV is being loaded: cancel_loads first, and step until has_loading is false",
                state="loading",
            )
        for seq in sorted((*self._queues.running, *self._queues.preempted), key=lambda seq: seq.order, reverse=True):
            if seq.state is RequestState.RUNNING:
                self.kv.free(seq.request_id)
            seq.lose_blocks()
            self._queues.move(seq, RequestState.WAITING)
            self._counters.frozen += 1

    def end_hand_offs(self) -> list[str]:
        """The connector withdrew every hand-off, or is gone: their blocks are free now. Returns the request ids."""
        return self._transfers.end_hand_offs()

    # How it is

    @property
    def admission_open(self) -> bool:
        return self._open

    @property
    def has_running(self) -> bool:
        """Something that has begun has not ended: it runs, or was preempted and will go on."""
        return bool(self._queues.running or self._queues.preempted)

    @property
    def has_loading(self) -> bool:
        """A peer's KV is being written into blocks of ours, be it for a request that was aborted."""
        return bool(self._queues.loading or self._queues.cancelling)

    @property
    def has_hand_offs(self) -> bool:
        return bool(self._queues.handed_off)

    @property
    def has_transfers(self) -> bool:
        """The connector's worker side has something to report sooner or later."""
        return self.has_loading or self.has_hand_offs

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    def running_ids(self) -> list[str]:
        """Those of ``has_running``, oldest first."""
        return [seq.request_id for seq in sorted((*self._queues.running, *self._queues.preempted), key=lambda seq: seq.order)]

    def loading_ids(self) -> list[str]:
        """Those that wait for a peer's KV and have not been answered."""
        return list(self._queues.loading)

    def waiting_ids(self) -> list[str]:
        return list(self._queues.waiting)

    def state_of(self, request_id: str) -> RequestState:
        """FINISHED for an id that is not known (any more)."""
        seq = self._queues.by_id.get(request_id)
        return RequestState.FINISHED if seq is None else seq.state

    def stats(self) -> SchedulerStats:
        queues = self._queues
        return SchedulerStats(
            admission_open=self._open,
            waiting=len(queues.waiting),
            running=len(queues.running),
            preempted=len(queues.preempted),
            loading=len(queues.loading),
            cancelling=len(queues.cancelling),
            handed_off=len(queues.handed_off),
            **self._counters.snapshot(),
        )

    def check_integrity(self) -> None:
        """BugError saying what disagrees: states and queues, tables and tokens, and everything in the KV cache.
        O(everything)."""
        check_integrity(self._queues, self.kv)
