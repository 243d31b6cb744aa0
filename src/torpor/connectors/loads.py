"""One load of one request, as the reader's threads and the engine's thread share it."""

from __future__ import annotations

import contextlib
import enum
import threading
from array import array
from collections.abc import Iterator

import numpy as np

from torpor.connectors.base import LoadRequest
from torpor.connectors.fence import sealed, told_digest
from torpor.connectors.geometry import Geometry
from torpor.connectors.params import RemoteParams, parse
from torpor.errors import PeerError
from torpor.kvcache.types import Epoch


class LoadCancelled(PeerError):
    """The load has ended under whoever works on it: it must not write any more."""


class LoadState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"  # a reader's thread works on it, or looks at times whether the owner has the hand-off
    DONE = "done"  # every block has arrived and was right after the read (P3)
    FAILED = "failed"  # nothing writes to its blocks any more


ENDED = (LoadState.DONE, LoadState.FAILED)


class Load:
    """Ends once. ``end`` waits for a write that is under way, so that whoever ended a load may give its blocks away."""

    def __init__(self, request: LoadRequest) -> None:
        """RequestError when the params are malformed."""
        self.request_id = request.request_id
        self.local = array("q", request.local_block_ids)
        self.params: RemoteParams = request.parsed or parse(request.params)
        self.epoch: Epoch = self.params.epoch
        self._handed_off = array("q", self.params.remote_block_ids)
        self.remote = self._handed_off[request.first_block : request.first_block + len(self.local)]
        self._request = request
        self._told: bytes | None = None
        self._word: int | None = None
        self._telling = threading.Lock()
        self.state = LoadState.QUEUED
        self._failing = False  # somebody waits for a write to end, to fail it: no other write begins
        self._lock = threading.Lock()

    @property
    def only_tells(self) -> bool:
        """There is nothing to read: the owner is told that it may let go."""
        return not len(self.local)

    @property
    def lease(self) -> int:
        return self.params.torpor.lease

    def check_against(self, ours: Geometry, theirs: Geometry, who: str) -> None:
        """PeerError unless every block lies inside both caches."""
        if len(self.remote) != len(self.local):
            raise PeerError(f"{len(self.local)} blocks are wanted, the hand-off has {len(self.remote)} of them", peer=who)
        worst = _highest(self._handed_off)
        if worst >= theirs.spec.num_blocks:
            raise PeerError(
                f"block {worst} is outside the KV cache of {who}, which has {theirs.spec.num_blocks} blocks", peer=who
            )
        if _highest(self.local) >= ours.spec.num_blocks:
            raise PeerError(f"a local block is outside 0..{ours.spec.num_blocks - 1}", peer=who)

    def expected_word(self, key: bytes) -> int:
        """``key``: the same at every call. Computed once, best while blocks are on their way: after the first look at it."""
        if self._word is None:
            self._word = sealed(key, self.told())
        return self._word

    def told(self) -> bytes:
        """The digest of all that we know of the hand-off. Computed once: some 200 us for 8192 tokens."""
        with self._telling:
            if self._told is None:
                self._told = self._digest()
            return self._told

    def prepare(self) -> None:
        """``told``, while the blocks are on their way. Not before: the thread that reads would wait for the interpreter."""
        if self.state is LoadState.RUNNING and self._told is None and self._telling.acquire(blocking=False):
            try:
                self._told = self._digest()
            finally:
                self._telling.release()

    def _digest(self) -> bytes:
        told, digest = self.params, self._request.digest
        return told_digest(self.epoch, self.lease, told.remote_request_id, told.remote_num_tokens, told.remote_block_ids, digest)

    @property
    def unwanted(self) -> bool:
        """It has ended, or somebody waits for a write to end, to end it."""
        return self._failing or self.state in ENDED

    def unwant(self) -> None:
        """Before ``end`` as failed: no write begins any more."""
        self._failing = True

    def start(self) -> bool:
        """False when it has ended while it waited."""
        with self._lock:
            if self.state in ENDED:
                return False
            self.state = LoadState.RUNNING
            return True

    def end(self, state: LoadState) -> bool:
        """Whether this call ended it."""
        assert state in ENDED
        if state is LoadState.FAILED:
            self.unwant()
        with self._lock:
            if self.state in ENDED or (self._failing and state is LoadState.DONE):
                return False
            self.state = state
            return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around every write into its blocks. LoadCancelled once it has ended."""
        with self._lock:
            if self.unwanted:
                raise LoadCancelled(f"the load of request {self.request_id} was cancelled", peer=self.params.remote_engine_id)
            yield


def _highest(blocks: array[int]) -> int:
    """A negative one is a very large one, which lies in no cache."""
    return int(np.frombuffer(blocks, dtype=np.uint64).max())
