"""Where every request is. Its state and the queue it is in change together, in one function, so they cannot disagree."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from torpor.errors import BugError
from torpor.scheduler.sequence import ANSWERED, MOVES, RequestState, Sequence


def _order(seq: Sequence) -> int:
    return seq.order


class RequestQueues:
    """``running`` and ``preempted`` are sorted by arrival, so their last is the youngest. ``waiting`` is too: whoever leaves it
    does so at the front, and whoever comes back is older than everyone who never left."""

    def __init__(self) -> None:
        self.by_id: dict[str, Sequence] = {}
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.loading: dict[str, Sequence] = {}
        self.cancelling: dict[str, Sequence] = {}
        self.handed_off: dict[str, Sequence] = {}
        self._answered: list[str] = []

    @property
    def num_seats_taken(self) -> int:
        """Requests that are computed, or will be as soon as their KV has arrived."""
        return len(self.running) + len(self.loading)

    def enter(self, seq: Sequence) -> None:
        """A new request, at the end of ``waiting``."""
        self.by_id[seq.request_id] = seq
        self.waiting[seq.request_id] = seq

    def move(self, seq: Sequence, to: RequestState) -> None:
        """The one way a request changes its state. BugError for a move that is not in MOVES. Going back to WAITING is to its
        front."""
        if to not in MOVES[seq.state]:
            raise BugError(f"request {seq.request_id!r} cannot go from {seq.state.value} to {to.value}")
        if to in ANSWERED and seq.state not in ANSWERED:
            self._answered.append(seq.request_id)
        self._take_out(seq)
        seq.state = to
        self._put_in(seq)

    def pop_answered(self) -> list[str]:
        """Who was answered since the last call."""
        answered, self._answered = self._answered, []
        return answered

    def _take_out(self, seq: Sequence) -> None:
        queue = self._queue(seq.state)
        if isinstance(queue, list):
            del queue[bisect_left(queue, seq.order, key=_order)]
        else:
            del queue[seq.request_id]

    def _put_in(self, seq: Sequence) -> None:
        if seq.state is RequestState.FINISHED:
            del self.by_id[seq.request_id]
            return
        queue = self._queue(seq.state)
        if isinstance(queue, list):
            insort(queue, seq, key=_order)
        else:
            queue[seq.request_id] = seq
            if seq.state is RequestState.WAITING:
                self.waiting.move_to_end(seq.request_id, last=False)

    def _queue(self, state: RequestState) -> dict[str, Sequence] | list[Sequence]:
        match state:
            case RequestState.WAITING:
                return self.waiting
            case RequestState.RUNNING:
                return self.running
            case RequestState.PREEMPTED:
                return self.preempted
            case RequestState.LOADING:
                return self.loading
            case RequestState.CANCELLING:
                return self.cancelling
            case RequestState.HANDED_OFF:
                return self.handed_off
            case RequestState.FINISHED:
                raise BugError("a finished request is in no queue")

    def _all(self) -> Iterator[tuple[RequestState, list[Sequence]]]:
        for state in RequestState:
            if state is not RequestState.FINISHED:
                queue = self._queue(state)
                yield state, queue if isinstance(queue, list) else list(queue.values())

    def check_integrity(self) -> None:
        """BugError when a request is not in exactly the queue of its state, or a queue is out of order."""
        seen: set[str] = set()
        for state, members in self._all():
            for seq in members:
                if seq.state is not state or self.by_id.get(seq.request_id) is not seq or seq.request_id in seen:
                    raise BugError(f"request {seq.request_id!r} is {seq.state.value} and in the queue of those {state.value}")
                seen.add(seq.request_id)
            orders = [seq.order for seq in members]
            in_order = state in (RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED)
            if in_order and orders != sorted(orders):
                raise BugError(f"the {state.value} requests are not in order of arrival: {orders[:20]}")
        if seen != self.by_id.keys():
            raise BugError(f"requests in no queue: {sorted(self.by_id.keys() - seen)}")
