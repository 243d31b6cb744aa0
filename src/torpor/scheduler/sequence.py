"""One request as the scheduler knows it, and the life it leads."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torpor.kvcache.prefix import HashChain
from torpor.kvcache.types import BlockId
from torpor.request import GenerationRequest, SamplingParams
from torpor.scheduler.token_counts import TokenCounts


class RequestState(enum.Enum):
    WAITING = "waiting"  # not begun, or frozen; holds no blocks; begins in order of arrival while admission is open
    LOADING = "loading"  # holds blocks that a peer's KV is being written into; not computed
    RUNNING = "running"  # holds blocks for every token it knows; computed whenever the budget allows
    PREEMPTED = "preempted"  # gave its blocks to an older one; goes on before any waiting one, also while admission is closed
    CANCELLING = "cancelling"  # answered; a peer may still write into its blocks until the connector says otherwise
    HANDED_OFF = "handed_off"  # answered; its blocks wait for a peer to read them
    FINISHED = "finished"  # answered; holds nothing and is forgotten


_S = RequestState
MOVES: dict[RequestState, frozenset[RequestState]] = {
    _S.WAITING: frozenset({_S.LOADING, _S.RUNNING, _S.FINISHED}),
    _S.LOADING: frozenset({_S.RUNNING, _S.CANCELLING}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.WAITING, _S.HANDED_OFF, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.WAITING, _S.FINISHED}),
    _S.CANCELLING: frozenset({_S.FINISHED}),
    _S.HANDED_OFF: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}
HOLDS_BLOCKS = frozenset({_S.LOADING, _S.RUNNING, _S.CANCELLING, _S.HANDED_OFF})
ANSWERED = frozenset({_S.CANCELLING, _S.HANDED_OFF, _S.FINISHED})


class Sequence:
    """Changed by the scheduler alone; ``state`` by ``RequestQueues.move`` alone."""

    __slots__ = (
        "block_ids",
        "chain",
        "counts",
        "forbidden",
        "load",
        "num_cached_tokens",
        "num_computed",
        "order",
        "outputs",
        "request",
        "sampling",
        "scheduled_step",
        "state",
        "tokens",
        "tried_remote",
    )

    def __init__(self, request: GenerationRequest, sampling: SamplingParams, order: int) -> None:
        self.request = request
        self.sampling = sampling  # the request's, with a seed
        self.order = order  # of arrival; lower is older and goes first
        self.state = RequestState.WAITING
        self.tokens = list(request.prompt_token_ids)  # prompt and outputs: what is known
        self.outputs: list[int] = []
        self.counts = TokenCounts(request.prompt_token_ids, self.outputs)
        self.num_computed = 0  # leading tokens whose KV is in the blocks
        self.block_ids: list[BlockId] = []  # the KV cache manager's own table while blocks are held
        self.chain = HashChain()
        self.num_cached_tokens: int | None = None  # prompt tokens that did not have to be computed when it first began
        self.tried_remote = False  # a connector is asked for a peer's KV once
        self.load: RemoteLoad | None = None
        self.scheduled_step = -1  # the step whose result is awaited
        # A stop token sampled too early would have to be thrown away: the sampler is told not to choose it.
        stops = () if sampling.ignore_eos else request.eos_token_ids
        self.forbidden = tuple(dict.fromkeys((*stops, *sampling.stop_token_ids))) if sampling.min_tokens > 0 else ()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def forbidden_now(self) -> tuple[int, ...]:
        return self.forbidden if self.forbidden and len(self.outputs) < self.sampling.min_tokens else ()

    def lose_blocks(self) -> None:
        """The blocks are gone: everything is computed again, and a result still on its way is not for us."""
        self.block_ids = []
        self.num_computed = 0
        self.scheduled_step = -1
        self.load = None


@dataclass(slots=True, kw_only=True)
class RemoteLoad:
    """KV of a request that comes from a peer."""

    num_local: int  # tokens of the prefix cache before it
    num_external: int  # tokens that arrive
    in_background: bool  # while other requests run (LOADING); else inside the request's first step (RUNNING)
    deadline: float  # of one in the background, on the scheduler's clock
    cancelled: bool = False
