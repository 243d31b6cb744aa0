"""What becomes of requests: the result of a step is taken in, and requests end."""

from __future__ import annotations

from typing import Any

from torpor.errors import BugError, DeviceError, RemoteError
from torpor.kvcache.manager import KVCacheManager
from torpor.request import EngineOutput, FinishReason
from torpor.scheduler.output import RunnerOutput, ScheduledSequence, SchedulerOutput
from torpor.scheduler.planner import Planner
from torpor.scheduler.queues import RequestQueues
from torpor.scheduler.sequence import RequestState, Sequence
from torpor.scheduler.stats import Counters
from torpor.scheduler.stopping import check_stop
from torpor.scheduler.transfers import Transfers


class Outcome:
    def __init__(
        self,
        kv: KVCacheManager,
        queues: RequestQueues,
        counters: Counters,
        transfers: Transfers,
        planner: Planner,
        context_len: int,
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._counters = counters
        self._transfers = transfers
        self._planner = planner
        self._context_len = context_len

    def take(self, output: SchedulerOutput, result: RunnerOutput) -> list[EngineOutput]:
        """New tokens, ends, and what the connector reported."""
        self._counters.steps += 1
        self._transfers.settle_sent(result)
        outputs: list[EngineOutput] = []
        by_id, step, failed = self._queues.by_id, output.step, result.failed
        for scheduled in output.sequences:
            request_id = scheduled.request_id
            seq = by_id.get(request_id)
            if seq is None or seq.scheduled_step != step:
                continue
            seq.scheduled_step = -1
            if seq.load is not None and not self._loaded_in_step(seq, result):
                continue
            if request_id in failed:
                outputs.append(self._fail(seq, failed[request_id]))
            elif self._advance(seq, scheduled):
                outputs.append(self._append(seq, result))
        self._transfers.settle_loads(result)
        return outputs

    def abandon(self, output: SchedulerOutput) -> None:
        """The result of this step never came; so neither did what a connector was to load inside it."""
        for scheduled in output.sequences:
            seq = self._queues.by_id.get(scheduled.request_id)
            if seq is not None and seq.state is RequestState.RUNNING and seq.load is not None:
                self._counters.loads_failed += 1
                self._planner.preempt(seq)

    def end(self, seq: Sequence, error: BaseException | None) -> EngineOutput:
        """A request that was not answered is ended from outside, or by an error. Returns its last output."""
        self._counters.aborted += error is None
        self._counters.failed += error is not None
        if seq.state is RequestState.LOADING:
            self._transfers.cancel(seq)
            self._queues.move(seq, RequestState.CANCELLING)
        else:
            if seq.state is RequestState.RUNNING:
                self._kv.free(seq.request_id)
                seq.lose_blocks()
            else:
                self._transfers.decline(seq)
            self._queues.move(seq, RequestState.FINISHED)
        return EngineOutput(
            request_id=seq.request_id,
            finish_reason=FinishReason.ABORT if error is None else FinishReason.ERROR,
            num_prompt_tokens=len(seq.request.prompt_token_ids),
            num_cached_tokens=seq.num_cached_tokens or 0,
            error=None if error is None else RemoteError.encode(error),
        )

    def _loaded_in_step(self, seq: Sequence, result: RunnerOutput) -> bool:
        """A load inside this very step: False when it failed, and with it everything computed on it (P5)."""
        if seq.request_id in result.failed_recving:
            self._counters.loads_failed += 1
            self._planner.preempt(seq)
            return False
        seq.load = None
        self._counters.loads_done += 1
        return True

    def _fail(self, seq: Sequence, why: str) -> EngineOutput:
        """Nothing can be sampled from what was computed, so its KV may be as bad: nobody else is to hit it."""
        self._kv.forget(seq.request_id)
        return self.end(seq, DeviceError(f"request {seq.request_id!r} cannot go on: {why}", operation="sample"))

    def _advance(self, seq: Sequence, scheduled: ScheduledSequence) -> bool:
        """The KV of the step's tokens is there. True when the last of them is the end of what is known."""
        count = len(scheduled.token_ids)
        seq.num_computed = computed = scheduled.start + count
        self._counters.computed_tokens += count
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = scheduled.start
            self._counters.prompt_tokens += len(seq.request.prompt_token_ids)
            self._counters.cached_tokens += scheduled.start
        if count > computed % self._kv.block_size:  # a block became full
            self._kv.commit(scheduled.request_id, seq.tokens, computed, seq.chain)
        return scheduled.samples

    def _append(self, seq: Sequence, result: RunnerOutput) -> EngineOutput:
        request_id = seq.request.request_id
        token = result.sampled.get(request_id)
        if token is None:
            raise BugError(f"the runner sampled no token for request {request_id!r}")
        seq.tokens.append(token)
        seq.outputs.append(token)
        self._counters.generated_tokens += 1
        logprobs = result.logprobs.get(request_id)
        reason, stop_reason = check_stop(seq, self._context_len)
        return EngineOutput(
            request_id=request_id,
            new_token_ids=[token],
            logprobs=None if logprobs is None else [logprobs],
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(seq.request.prompt_token_ids),
            num_cached_tokens=seq.num_cached_tokens or 0,
            kv_transfer_params=None if reason is None else self._finish(seq),
        )

    def _finish(self, seq: Sequence) -> dict[str, Any] | None:
        self._counters.finished += 1
        return self._transfers.finish(seq)
