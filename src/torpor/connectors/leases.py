"""Hand-offs of the owner: which blocks a reader may read, until when, and the words in the fence that say so."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torpor.connectors.base import HandOff
from torpor.connectors.fence import FencePage, commitment
from torpor.kvcache.types import Epoch

logger = logging.getLogger(__name__)

CONFIRM_S = 5.0  # after its bytes have arrived, a reader looks at the fence and says so within this, or not at all


_UNREAD = "nobody read the KV of request %s (%d blocks): its lease has expired"


@dataclass(frozen=True, slots=True)
class Lease:
    number: int
    request_id: str
    word: int  # its commitment
    num_blocks: int
    deadline: float  # of the clock
    arrived: bool = False  # the transport says that its reader has the bytes


class LeaseTable:
    """Any thread may call. A lease ends once: read, expired, superseded or withdrawn; its word is cleared before anybody hears
    of it, so blocks are never free while a reader could still find its read valid."""

    def __init__(self, fence: FencePage, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._fence = fence
        self._key = key
        self._clock = clock
        self._lock = threading.Lock()
        self._epoch: Epoch | None = None
        self._leases: dict[int, Lease] = {}
        self._ended: set[str] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, epoch: Epoch) -> None:
        with self._lock:
            self._epoch = epoch
            self._fence.open(epoch)

    def grant(self, hand_off: HandOff) -> None:
        """While shut, or under another epoch than the hand-off's: it has ended before it began."""
        with self._lock:
            if self._epoch is None or hand_off.epoch != str(self._epoch):
                self._ended.add(hand_off.request_id)
                return
            word = commitment(
                self._key,
                self._epoch,
                hand_off.lease,
                hand_off.request_id,
                hand_off.num_tokens,
                hand_off.block_ids,
                hand_off.digest,
            )
            self._make_room(hand_off.lease)
            deadline = self._clock() + hand_off.lease_s
            self._leases[hand_off.lease] = Lease(hand_off.lease, hand_off.request_id, word, len(hand_off.block_ids), deadline)
            self._fence.grant(hand_off.lease, word)

    def read_done(self, number: int, word: int) -> Lease | None:
        """The lease that ended; None when there is no such lease: a repeated or an invented message changes nothing."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.word != word:
                return None
            self._end(lease)
            return lease

    def note_arrived(self, number: int, word: int) -> None:
        """The reader has the bytes, and has yet to find them valid: the lease stays for that moment. It need not stay for a
        reader that died since."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is not None and lease.word == word and not lease.arrived:
                deadline = min(lease.deadline, self._clock() + CONFIRM_S)
                self._leases[number] = dataclasses.replace(lease, arrived=True, deadline=deadline)

    def take_ended(self) -> frozenset[str]:
        """Ends what is due; the requests whose leases ended since the last call."""
        with self._lock:
            now = self._clock()
            for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
                what = "whoever read the KV of request %s (%d blocks) is silent" if lease.arrived else _UNREAD
                logger.warning(what, lease.request_id, lease.num_blocks)
                self._end(lease)
            ended, self._ended = frozenset(self._ended), set()
            return ended

    def shut(self) -> int:
        """Ends all leases; the number of those. Reads that end from now on are not valid."""
        with self._lock:
            self._epoch = None
            self._fence.shut()
            ended = len(self._leases)
            self._ended.update(lease.request_id for lease in self._leases.values())
            self._leases.clear()
            return ended

    def _make_room(self, number: int) -> None:
        """One lease a slot: the older one is recomputed by its reader."""
        for lease in [lease for lease in self._leases.values() if (lease.number - number) % self._fence.slots == 0]:
            logger.warning("more than %d hand-offs wait: request %s gives way", self._fence.slots, lease.request_id)
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        self._fence.end(lease.number)
        del self._leases[lease.number]
        self._ended.add(lease.request_id)
