"""Puts a step together: who is computed, who begins, who gives way."""

from __future__ import annotations

from torpor.kvcache.manager import KVCacheManager
from torpor.scheduler.config import SchedulerConfig
from torpor.scheduler.output import ScheduledSequence
from torpor.scheduler.queues import RequestQueues
from torpor.scheduler.sequence import RequestState, Sequence
from torpor.scheduler.stats import Counters
from torpor.scheduler.transfers import Transfers


class Step:
    """A step while it is put together."""

    __slots__ = ("budget", "number", "sequences")

    def __init__(self, number: int, budget: int) -> None:
        self.number = number
        self.budget = budget  # tokens that still fit
        self.sequences: list[ScheduledSequence] = []

    def add(self, seq: Sequence) -> None:
        """As much of ``seq`` as the budget allows. What the sequence has goes in as it is: only its next tokens are
        copied."""
        start = seq.num_computed
        known = len(seq.tokens)
        end = min(known, start + self.budget)
        self.budget -= end - start
        seq.scheduled_step = self.number
        self.sequences.append(
            ScheduledSequence(
                request_id=seq.request.request_id,
                token_ids=seq.tokens[start:end],
                start=start,
                block_ids=seq.block_ids,
                samples=end == known,
                sampling=seq.sampling,
                counts=seq.counts,
                forbidden_token_ids=seq.forbidden_now() if seq.forbidden else (),
            )
        )


class Planner:
    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, queues: RequestQueues, counters: Counters, transfers: Transfers
    ) -> None:
        self._config = config
        self._kv = kv
        self._queues = queues
        self._counters = counters
        self._transfers = transfers
        # Blocks that a request which begins beside others leaves free, so that it is not preempted by their next tokens.
        self._reserve = max(1, kv.num_blocks // 100)

    def plan(self, number: int, *, admit: bool) -> list[ScheduledSequence]:
        """The sequences of step ``number``; with ``admit``, waiting requests may begin."""
        step = Step(number, self._config.token_budget)
        for seq in self._add_decodes(step):
            if step.budget and seq.state is RequestState.RUNNING:
                step.add(seq)
        self._begin_requests(step, admit)
        return step.sequences

    def preempt(self, seq: Sequence) -> None:
        """Its blocks go to somebody else; it goes on later, before anyone who waits."""
        self._counters.preemptions += 1
        self._kv.free(seq.request_id)
        seq.lose_blocks()
        self._queues.move(seq, RequestState.PREEMPTED)

    def _add_decodes(self, step: Step) -> list[Sequence]:
        """One token for each request that has one to compute, oldest first. Returns the others, whose prompts are under way."""
        running, block_size = self._queues.running, self._kv.block_size
        prefills: list[Sequence] = []
        index = 0
        while index < len(running):  # it gets shorter at its end when somebody is preempted
            seq = running[index]
            index += 1
            known = len(seq.tokens)
            if known - seq.num_computed != 1:
                prefills.append(seq)
            elif step.budget:
                if known > len(seq.block_ids) * block_size and not self._grow(seq):
                    break
                step.add(seq)
        return prefills

    def _grow(self, seq: Sequence) -> bool:
        """Room for one more token, taken from the youngest if need be. False when the youngest is ``seq`` itself."""
        while not self._kv.can_grow(seq.request_id, len(seq.tokens)):
            victim = self._queues.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        self._kv.grow(seq.request_id, len(seq.tokens))
        return True

    def _begin_requests(self, step: Step, admit: bool) -> None:
        """Preempted requests go on, then waiting ones begin, strictly in order: one that does not fit holds up those behind it.

        Whoever was preempted in this very step does not: its blocks just sufficed for it, and somebody else has one of them."""
        queues = self._queues
        while queues.num_seats_taken < self._config.seats:
            if queues.preempted:
                seq = queues.preempted[0]
            elif admit and queues.waiting:
                seq = next(iter(queues.waiting.values()))
            else:
                return
            if not self._begin(seq, step):
                return

    def _begin(self, seq: Sequence, step: Step) -> bool:
        """False when there is no room for it now."""
        if not step.budget and not self._transfers.may_load(seq):
            return False
        hit = self._kv.find_prefix(seq.tokens, seq.chain)
        num_external, asynchronous = self._transfers.external_tokens(seq, hit.num_tokens)
        loading = num_external > 0 and asynchronous
        reserve = self._reserve if self._queues.num_seats_taken else 0
        if not (step.budget or loading) or not self._kv.can_allocate(len(seq.tokens), hit, reserve):
            return False
        seq.block_ids = self._kv.allocate(seq.request_id, len(seq.tokens), hit)
        self._queues.move(seq, RequestState.LOADING if loading else RequestState.RUNNING)
        self._transfers.begin(seq, hit.num_tokens, num_external)
        if loading:
            seq.num_computed = hit.num_tokens
        else:
            seq.num_computed = min(hit.num_tokens + num_external, len(seq.tokens) - 1)
            step.add(seq)
        return True
