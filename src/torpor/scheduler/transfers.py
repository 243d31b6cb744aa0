"""The scheduler's dealings with a KV connector: loads from peers, and hand-offs to them. Without a connector all of it does
nothing.

A connector is asked once per request, when the request first begins. Its blocks are private, and enter the prefix cache only
when the connector has confirmed them. What a peer holds may end with the last token of the prompt; that token is computed again
all the same, for its logits. It lies in the last block of the load, which is not yet in the prefix cache then (``commit`` stops
before the last token), so the write is to a private block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor.kvcache.manager import KVCacheManager
from torpor.scheduler.base import SchedulerConnector
from torpor.scheduler.output import RunnerOutput
from torpor.scheduler.queues import RequestQueues
from torpor.scheduler.sequence import RemoteLoad, RequestState, Sequence
from torpor.scheduler.stats import Counters


class Transfers:
    def __init__(
        self,
        kv: KVCacheManager,
        queues: RequestQueues,
        counters: Counters,
        connector: SchedulerConnector | None,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._counters = counters
        self._connector = connector
        self._timeout_s = timeout_s
        self._clock = clock

    # Loads

    def may_load(self, seq: Sequence) -> bool:
        """Whether a peer may have KV of it: it was not asked for yet."""
        return self._connector is not None and not seq.tried_remote

    def external_tokens(self, seq: Sequence, num_local: int) -> tuple[int, bool]:
        """How many tokens after the first ``num_local`` a peer has, and whether they arrive while other requests run. Changes
        nothing."""
        if self._connector is None or seq.tried_remote:
            return 0, False
        count, asynchronous = self._connector.get_num_new_matched_tokens(seq.request, num_local)
        return max(0, min(count, len(seq.tokens) - num_local)), asynchronous

    def begin(self, seq: Sequence, num_local: int, num_external: int) -> None:
        """The request has its blocks: tell the connector which of them the external tokens belong in."""
        if self._connector is None or seq.tried_remote:
            return
        seq.tried_remote = True
        if num_external == 0:
            self._connector.update_state_after_alloc(seq.request, [], 0)
            return
        first = num_local // self._kv.block_size
        blocks = seq.block_ids[first : self._kv.blocks_for(num_local + num_external)]
        self._connector.update_state_after_alloc(seq.request, blocks, num_external)
        seq.load = RemoteLoad(
            num_local=num_local,
            num_external=num_external,
            in_background=seq.state is RequestState.LOADING,
            deadline=self._clock() + self._timeout_s,
        )

    def decline(self, seq: Sequence) -> None:
        """The request ends before it began: the peer need not keep its blocks for it."""
        self.begin(seq, 0, 0)

    def expire(self) -> None:
        """Give up on loads that are late. They are recomputed when the connector says that nothing writes to their blocks any
        more."""
        if not self._queues.loading:
            return
        now = self._clock()
        for seq in self._queues.loading.values():
            if seq.load is not None and not seq.load.cancelled and now >= seq.load.deadline:
                self._counters.loads_timed_out += 1
                self.cancel(seq)

    def cancel(self, seq: Sequence) -> None:
        """Ask the connector to stop a load; it answers through ``settle_loads``. Repeating does nothing."""
        if self._connector is not None and seq.load is not None and not seq.load.cancelled:
            seq.load.cancelled = True
            self._connector.cancel_load(seq.request_id)

    def settle_sent(self, result: RunnerOutput) -> None:
        """Hand-offs that the worker side reported as over. To be called before a request of the same step is handed off: what
        is reported cannot be of that one, though an older one that ``end_hand_offs`` ended may have had its name. Names that
        wait for no report are passed over: they are late echoes."""
        for request_id in result.finished_sending:
            if seq := self._queues.handed_off.get(request_id):
                self._free(seq)

    def settle_loads(self, result: RunnerOutput) -> None:
        """Loads that the worker side reported as over; late echoes are passed over."""
        for request_id in result.failed_recving:
            self._load_ended(request_id, arrived=False)
        for request_id in result.finished_recving:
            self._load_ended(request_id, arrived=True)

    def _load_ended(self, request_id: str, *, arrived: bool) -> None:
        if seq := self._queues.cancelling.get(request_id):
            self._free(seq)
            return
        seq = self._queues.loading.get(request_id)
        if seq is None or seq.load is None:
            return
        load, seq.load = seq.load, None
        if arrived:
            self.confirm(seq, load)
        else:
            self._counters.loads_failed += 1
            seq.num_computed = load.num_local
        self._queues.move(seq, RequestState.RUNNING)

    def confirm(self, seq: Sequence, load: RemoteLoad) -> None:
        """The bytes are there and are the right ones."""
        self._counters.loads_done += 1
        seq.num_computed = min(load.num_local + load.num_external, len(seq.tokens) - 1)
        self._kv.commit(seq.request_id, seq.tokens, seq.num_computed, seq.chain)

    # Hand-offs

    def finish(self, seq: Sequence) -> dict[str, Any] | None:
        """The request ended with its KV intact: it is handed off, or its blocks are freed. Returns what the client needs to
        know."""
        if self._connector is None:
            self._free(seq)
            return None
        keep, params = self._connector.request_finished(seq.request, list(seq.block_ids), seq.num_computed)
        if keep:
            self._queues.move(seq, RequestState.HANDED_OFF)
        else:
            self._free(seq)
        return params

    def end_hand_offs(self) -> list[str]:
        ended = list(self._queues.handed_off)
        for seq in list(self._queues.handed_off.values()):
            self._free(seq)
        return ended

    def metadata(self) -> Any:
        """What the worker side must know with the next step; None when nothing."""
        return (self._connector.build_connector_meta() or None) if self._connector is not None else None

    def _free(self, seq: Sequence) -> None:
        self._kv.free(seq.request_id)
        seq.lose_blocks()
        self._queues.move(seq, RequestState.FINISHED)
