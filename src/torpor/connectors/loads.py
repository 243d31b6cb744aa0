"""One load of one request, as the reader's threads and the engine's thread share it."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator

from torpor.connectors.base import LoadRequest
from torpor.connectors.fence import commitment
from torpor.connectors.geometry import Geometry
from torpor.connectors.params import RemoteParams, parse
from torpor.errors import PeerError
from torpor.kvcache.types import Epoch


class LoadCancelled(PeerError):
    """The load has ended under whoever works on it: it must not write any more."""


class LoadState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"  # a reader's thread works on it
    DONE = "done"  # every block has arrived and was right after the read (P3)
    FAILED = "failed"  # nothing writes to its blocks any more


ENDED = (LoadState.DONE, LoadState.FAILED)


class Load:
    """Ends once. ``end`` waits for a write that is under way, so that whoever ended a load may give its blocks away."""

    def __init__(self, request: LoadRequest) -> None:
        """RequestError when the params are malformed."""
        self.request_id = request.request_id
        self.local = list(request.local_block_ids)
        self.params: RemoteParams = parse(request.params)
        self.remote = self.params.remote_block_ids[request.first_block : request.first_block + len(self.local)]
        self.digest = request.digest
        self.state = LoadState.QUEUED
        self._failing = False  # somebody waits for a write to end, to fail it: no other write begins
        self._lock = threading.Lock()

    @property
    def only_tells(self) -> bool:
        """There is nothing to read: the owner is told that it may let go."""
        return not self.local

    @property
    def epoch(self) -> Epoch:
        return self.params.epoch

    @property
    def lease(self) -> int:
        return self.params.torpor.lease

    def check_against(self, ours: Geometry, theirs: Geometry, who: str) -> None:
        """PeerError unless every block lies inside both caches."""
        if len(self.remote) != len(self.local):
            raise PeerError(f"{len(self.local)} blocks are wanted, the hand-off has {len(self.remote)} of them", peer=who)
        worst = max(self.params.remote_block_ids)
        if worst >= theirs.spec.num_blocks:
            raise PeerError(
                f"block {worst} is outside the KV cache of {who}, which has {theirs.spec.num_blocks} blocks", peer=who
            )
        if not all(0 <= block < ours.spec.num_blocks for block in self.local):
            raise PeerError(f"a local block is outside 0..{ours.spec.num_blocks - 1}", peer=who)

    def expected_word(self, key: bytes) -> int:
        told = self.params
        return commitment(
            key, self.epoch, self.lease, told.remote_request_id, told.remote_num_tokens, told.remote_block_ids, self.digest
        )

    def start(self) -> bool:
        """False when it has ended in the queue."""
        with self._lock:
            if self.state is not LoadState.QUEUED:
                return False
            self.state = LoadState.RUNNING
            return True

    def end(self, state: LoadState) -> bool:
        """Whether this call ended it."""
        assert state in ENDED
        self._failing |= state is LoadState.FAILED
        with self._lock:
            if self.state in ENDED or (self._failing and state is LoadState.DONE):
                return False
            self.state = state
            return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around every write into its blocks. LoadCancelled once it has ended."""
        with self._lock:
            if self._failing or self.state in ENDED:
                raise LoadCancelled(f"the load of request {self.request_id} was cancelled", peer=self.params.remote_engine_id)
            yield
