"""A model, a runner and a connector for the scheduler's tests, small enough to be sure of.

The model is a pure function of all tokens before: the KV of a position is a mark made from the weights and every token up to
it, and the next token follows from the last mark. The runner keeps the marks in blocks, as a KV cache would, and checks *every*
mark that a sequence builds upon before it goes on. So a block that was shared, reused, written or hit wrongly is found in the
step it happens in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torpor.errors import RequestError
from torpor.kvcache.manager import KVCacheManager
from torpor.kvcache.types import BlockId
from torpor.request import EngineOutput, GenerationRequest, SamplingParams
from torpor.scheduler import RunnerOutput, Scheduler, SchedulerConfig, SchedulerOutput

VOCABULARY = 1009
GARBAGE = -1


def _mix(mark: int, token: int) -> int:
    return (mark * 6364136223846793005 + token * 1442695040888963407 + 1013904223) % 2**61


def marks(weights: str, tokens: list[int]) -> list[int]:
    """The KV of every position of ``tokens``."""
    mark, result = sum(weights.encode()), []
    for token in tokens:
        mark = _mix(mark, token)
        result.append(mark)
    return result


def next_token(weights: str, tokens: list[int]) -> int:
    return (marks(weights, tokens)[-1] >> 20) % VOCABULARY


def generate(prompt: list[int], count: int, weights: str = "w") -> list[int]:
    """What must come out, whatever chunks, hits, preemptions, loads and freezes lay in between."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(weights, tokens))
    return tokens[len(prompt) :]


@dataclass
class FakeLoad:
    block_ids: list[BlockId]
    start: int
    num_tokens: int
    prompt: list[int]


@dataclass
class FakeMeta:
    started: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.started or self.cancelled)


class FakeConnector:
    """Both sides of a connector. ``remote_tokens`` of the params says what the peer holds; ``sync`` that it arrives inside the
    step.

    A load in flight scribbles over its blocks in every step; only ``complete`` leaves the right marks.
    """

    def __init__(self) -> None:
        self.loads: dict[str, FakeLoad] = {}
        self.sync_loads: dict[str, FakeLoad] = {}
        self.fail_sync: set[str] = set()
        self.hand_offs: dict[str, tuple[list[BlockId], list[int]]] = {}
        self.told: dict[str, list[tuple[list[BlockId], int]]] = {}  # update_state_after_alloc, per request
        self.finished: dict[str, tuple[list[BlockId], int]] = {}
        self.cancelled: list[str] = []
        self.meta = FakeMeta()
        self.recving: set[str] = set()
        self.failed: set[str] = set()
        self.sending: set[str] = set()
        self.block_size = 0

    # the scheduler's side

    def get_num_new_matched_tokens(self, request: GenerationRequest, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        assert num_computed_tokens % self.block_size == 0
        return max(0, params.get("remote_tokens", 0) - num_computed_tokens), not params.get("sync", False)

    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        self.told.setdefault(request.request_id, []).append((list(block_ids), num_external_tokens))
        if not num_external_tokens:
            return
        params = request.kv_transfer_params or {}
        end = min(params["remote_tokens"], len(request.prompt_token_ids))
        load = FakeLoad(list(block_ids), end - num_external_tokens, num_external_tokens, request.prompt_token_ids)
        (self.sync_loads if params.get("sync") else self.loads)[request.request_id] = load
        self.meta.started.append(request.request_id)

    def request_finished(
        self, request: GenerationRequest, block_ids: list[BlockId], num_computed_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        self.finished[request.request_id] = (list(block_ids), num_computed_tokens)
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self.hand_offs[request.request_id] = (list(block_ids), request.prompt_token_ids)
        return True, {"remote_block_ids": list(block_ids), "remote_num_tokens": num_computed_tokens}

    def cancel_load(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.meta.cancelled.append(request_id)

    def build_connector_meta(self) -> FakeMeta:
        meta, self.meta = self.meta, FakeMeta()
        return meta

    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        if params.get("bad"):
            raise RequestError("bad params", param="kv_transfer_params")

    # the worker's side, and what the test does to it

    def complete(self, request_id: str, kv: FakeKV) -> None:
        kv.write_load(self.loads.pop(request_id), good=True)
        self.recving.add(request_id)

    def fail(self, request_id: str) -> None:
        del self.loads[request_id]
        self.failed.add(request_id)

    def read(self, request_id: str, kv: FakeKV) -> None:
        """A peer reads a hand-off: it must still be what it was."""
        kv.check_hand_off(*self.hand_offs.pop(request_id))
        self.sending.add(request_id)

    def report(self) -> dict[str, frozenset[str]]:
        result = {
            "finished_recving": frozenset(self.recving),
            "failed_recving": frozenset(self.failed),
            "finished_sending": frozenset(self.sending),
        }
        self.recving, self.failed, self.sending = set(), set(), set()
        return result


class FakeKV:
    """Marks in blocks."""

    def __init__(self, manager: KVCacheManager, weights: str) -> None:
        self.manager = manager
        self.weights = weights
        self.clear()

    def clear(self) -> None:
        self.slots = [[GARBAGE] * self.manager.block_size for _ in range(self.manager.num_blocks)]

    def read(self, block_ids: list[BlockId], position: int) -> int:
        size = self.manager.block_size
        return self.slots[block_ids[position // size]][position % size]

    def write(self, block_ids: list[BlockId], position: int, mark: int) -> None:
        block = block_ids[position // self.manager.block_size]
        assert not self.manager.is_cached(block), f"write to block {block}, which is in the prefix cache"
        self.slots[block][position % self.manager.block_size] = mark

    def write_load(self, load: FakeLoad, *, good: bool) -> None:
        wanted = marks(self.weights, load.prompt)
        for index in range(load.num_tokens):
            self.write(load.block_ids, index, wanted[load.start + index] if good else GARBAGE)

    def check_hand_off(self, block_ids: list[BlockId], prompt: list[int]) -> None:
        for position, mark in enumerate(marks(self.weights, prompt)):
            assert self.read(block_ids, position) == mark, "the blocks of a hand-off changed before it was read"


class Engine:
    """A scheduler with the fakes around it, driven step by step. ``steps`` holds every output that was executed."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 1000,
        weights: str = "w",
        caching: bool = True,
        connector: bool = False,
        clock: Any = None,
        **config: Any,
    ) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, caching, weights)
        self.kv = FakeKV(self.manager, weights)
        self.connector = FakeConnector() if connector else None
        if self.connector:
            self.connector.block_size = block_size
        extra = {} if clock is None else {"clock": clock}
        self.scheduler = Scheduler(SchedulerConfig(**config), self.manager, max_model_len, self.connector, **extra)
        self.steps: list[SchedulerOutput] = []
        self.text: dict[str, list[int]] = {}
        self.last: dict[str, EngineOutput] = {}  # the output that carried a finish_reason

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int = 4, params: dict[str, Any] | None = None, **kw: Any
    ) -> None:
        eos = kw.pop("eos", ())
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **kw)
        self.scheduler.add(
            GenerationRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling=sampling, eos_token_ids=eos, kv_transfer_params=params
            )
        )

    def step(self) -> SchedulerOutput | None:
        """One step, with ``check_integrity``. None when there was nothing to do."""
        output = self.scheduler.schedule()
        if output is None and self.scheduler.has_transfers:
            output = self.scheduler.empty_step()
        if output is not None:
            self.take(self.scheduler.update(output, self.execute(output)))
        self.scheduler.check_integrity()
        return output

    def run(self, limit: int = 500) -> None:
        """Until nobody is left."""
        for _ in range(limit):
            if not (self.scheduler.has_running or self.scheduler.num_waiting or self.scheduler.has_loading):
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")

    def run_until_answered(self, request_id: str, limit: int = 100) -> None:
        for _ in range(limit):
            if request_id in self.last:
                return
            self.step()
        raise AssertionError(f"{request_id} has no answer after {limit} steps")

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.last, "an output after the last one"
            self.text.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.last[output.request_id] = output

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.steps.append(output)
        assert output.num_tokens <= self.scheduler.config.token_budget
        assert len(output.sequences) <= self.scheduler.config.seats
        sync_failed = self._do_loads()
        sampled = {}
        for seq in output.sequences:
            ruined = seq.request_id in sync_failed
            token = self._run_sequence(seq, ruined)
            if seq.samples:
                sampled[seq.request_id] = token
        report = self.connector.report() if self.connector else {}
        if sync_failed:
            report["failed_recving"] |= sync_failed
        return RunnerOutput(sampled=sampled, **report)

    def _do_loads(self) -> frozenset[str]:
        if self.connector is None:
            return frozenset()
        for load in self.connector.loads.values():
            self.kv.write_load(load, good=False)
        failed = frozenset(self.connector.fail_sync & self.connector.sync_loads.keys())
        for request_id, load in self.connector.sync_loads.items():
            self.kv.write_load(load, good=request_id not in failed)
        self.connector.sync_loads.clear()
        return failed

    def _run_sequence(self, seq: Any, ruined: bool) -> int:
        known = [*seq.counts.prompt, *seq.counts.outputs]
        end = seq.start + len(seq.token_ids)
        assert seq.token_ids
        assert seq.token_ids == known[seq.start : end]
        assert seq.samples == (end == len(known))
        assert len(seq.block_ids) * self.manager.block_size >= end
        wanted = marks(self.kv.weights, known[:end])
        for position in range(seq.start):
            found = self.kv.read(seq.block_ids, position)
            assert ruined or found == wanted[position], f"{seq.request_id}: wrong KV at {position} of {seq.start}"
        for position in range(seq.start, end):
            self.kv.write(seq.block_ids, position, GARBAGE if ruined else wanted[position])
        return next_token(self.kv.weights, known) if seq.samples and not ruined else 0
