"""The fence (P3): words in memory that never sleeps, which a reader looks at after it has read and before it uses the bytes.

    word 0        a constant
    word 1        the boot id of the owner's epoch
    word 2        the counter of the owner's epoch; 0 while the KV cache is released
    word 3        how many slots follow
    word 4        the highest lease number applied so far
    word 5..7     0
    word 8 + i    slot i: the commitment of the lease whose number is i modulo the slots, or 0

The owner clears words before it unmaps or frees, and the reader reads them after the bytes. Each word is one aligned store or
load, in program order; the interpreter's lock, taken between the bytes and the words, is a barrier where the CPU needs one.

A commitment is a keyed digest over everything a reader is told of a hand-off, its block ids above all, and the tokens whose KV it
is. So a request that names other blocks than were handed off, or another prompt, does not match, without a question to the owner.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import hmac
import mmap
import os
import secrets
from collections.abc import Sequence

import msgspec
import numpy as np

from torpor.errors import TransportError
from torpor.kvcache.types import Epoch

MAGIC = 0x746F72706F720001
HEADER_WORDS = 8
WORD_BYTES = 8
_BOOT, _COUNTER, _SLOTS, _APPLIED = 1, 2, 3, 4


class Verdict(enum.Enum):
    VALID = "valid"  # the epoch is the owner's present one and the lease runs: what was read before is right
    NOT_YET = "not yet"  # the owner's worker has not heard of this hand-off so far; look again soon
    LEASE_OVER = "lease over"  # expired, ended, withdrawn, or never made with these blocks
    RELEASED = "released"  # the owner's KV cache is being unmapped, or is
    OTHER_EPOCH = "other epoch"  # the owner's KV cache was mapped anew
    NO_FENCE = "no fence"  # these words are not a fence


def new_lease_key() -> bytes:
    return secrets.token_bytes(32)


def commitment(
    key: bytes, epoch: Epoch, lease: int, request_id: str, num_tokens: int, block_ids: Sequence[int], digest: bytes
) -> int:
    """64 bits, never 0. ``digest`` is of the tokens: the KV of another prompt does not match either."""
    return sealed(key, told_digest(epoch, lease, request_id, num_tokens, block_ids, digest))


def told_digest(epoch: Epoch, lease: int, request_id: str, num_tokens: int, block_ids: Sequence[int], digest: bytes) -> bytes:
    """Of what a commitment is to, without the key."""
    told = msgspec.msgpack.encode((str(epoch), lease, request_id, num_tokens, list(block_ids), digest))
    return hashlib.sha256(told).digest()


def sealed(key: bytes, told: bytes) -> int:
    return int.from_bytes(hmac.digest(key, told, "sha256")[:8], "little") or 1


def judge(header: Sequence[int], word: int, epoch: Epoch, lease: int, expected: int) -> Verdict:
    verdict = heard(header, epoch, lease)
    if verdict is not Verdict.VALID:
        return verdict
    return Verdict.VALID if word == expected else Verdict.LEASE_OVER


def heard(header: Sequence[int], epoch: Epoch, lease: int) -> Verdict:
    """VALID: the owner's worker has heard of a lease of that number, in its present epoch. Whose it is only the word tells."""
    if header[0] != MAGIC:
        return Verdict.NO_FENCE
    if header[_BOOT] != int(epoch.boot, 16):
        return Verdict.OTHER_EPOCH
    if header[_COUNTER] == 0:
        return Verdict.RELEASED
    if header[_COUNTER] != epoch.counter:
        return Verdict.OTHER_EPOCH
    return Verdict.VALID if lease <= header[_APPLIED] else Verdict.NOT_YET


def fence_bytes(slots: int) -> int:
    """Whole pages."""
    raw = (HEADER_WORDS + slots) * WORD_BYTES
    return -(-raw // mmap.PAGESIZE) * mmap.PAGESIZE


def word_offset(lease: int, slots: int) -> int:
    """Bytes from the fence's begin to the word of a lease."""
    return (HEADER_WORDS + lease % slots) * WORD_BYTES


class FencePage:
    """The owner's end: a sealed memfd outside every pool. Written by one thread at a time."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.nbytes = fence_bytes(slots)
        self.fd = os.memfd_create("torpor:fence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        # Nobody can make it shorter under a reader that has it mapped.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, self.nbytes)
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        self._words = memoryview(self._map).cast("Q")
        self._words[_SLOTS] = slots
        self._words[0] = MAGIC

    def open(self, epoch: Epoch) -> None:
        """Leases of ``epoch`` can be valid from now on."""
        self._clear()
        self._words[_BOOT] = int(epoch.boot, 16)
        self._words[_COUNTER] = epoch.counter

    def shut(self) -> None:
        """No read that ends from now on is valid."""
        self._words[_COUNTER] = 0
        self._clear()

    def grant(self, lease: int, word: int) -> None:
        self._words[HEADER_WORDS + lease % self.slots] = word
        self._words[_APPLIED] = max(self._words[_APPLIED], lease)

    def end(self, lease: int) -> None:
        self._words[HEADER_WORDS + lease % self.slots] = 0

    def close(self) -> None:
        if self._map.closed:
            return
        self._words[_COUNTER] = 0
        self._words.release()
        self._map.close()
        os.close(self.fd)

    def _clear(self) -> None:
        """At once: a word that is half cleared is no lease's either, and one by one 65536 take 5 ms of a sleep."""
        first, size = HEADER_WORDS * WORD_BYTES, self.slots * WORD_BYTES
        self._map[first : first + size] = bytes(size)


class FenceView:
    """The reader's end where the page can be mapped: read only, and of the size that was offered."""

    def __init__(self, fd: int, slots: int) -> None:
        nbytes = fence_bytes(slots)
        if os.fstat(fd).st_size < nbytes:
            raise TransportError(f"a fence of {slots} slots needs {nbytes} bytes, it has {os.fstat(fd).st_size}", transport="ipc")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransportError("the fence is not sealed: a look at it could fault", transport="ipc")
        self._slots = slots
        self._map = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")

    def look(self, lease: int) -> tuple[Sequence[int], int]:
        """The header and the word of a lease, for ``judge``."""
        return self._words[:HEADER_WORDS].tolist(), self._words[HEADER_WORDS + lease % self._slots]

    def close(self) -> None:
        if not self._map.closed:
            self._words.release()
            self._map.close()
