"""P4a: a release is believed when it is seen. A transport's own cache may keep pages pinned that it was told to drop.

Host memory only: what a network card or a peer has of device memory shows in no count of the process. There an import is seen by
the fence that goes with it (``ipc``), and a transport's word is all there is for its own registration (``nixl``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from torpor.errors import TransportError
from torpor.memory.procfs import pinned_bytes

SETTLE_S = 1.0  # a driver may unpin a moment after the call that asked for it
POLL_S = 0.01

changing_pins = threading.RLock()  # of this process: whoever registers or deregisters, while somebody looks at their sum


class PinWatch:
    """Remembers that a registration of the KV cache pinned it (VmPin), and asks that back when it is deregistered.

    Totals before and after are not compared: the transport pins memory of its own meanwhile, which stays. UCX over RDMA verbs
    took 20 MiB during its first registration, and 10 more with the first read. So a registration counts for its own bytes, no
    more, and what it pinned must be unpinned while it is deregistered.
    """

    def __init__(self, pinned: Callable[[], int] = pinned_bytes) -> None:
        self._pinned = pinned
        self._held = 0
        self.tell: Callable[[int], None] = _nothing  # is told ``held_bytes`` whenever they may have changed
        self.explained_bytes = 0  # VmPin when all that a registration had pinned was seen to be gone: none of it is the KV cache

    @property
    def held_bytes(self) -> int:
        """Pinned by registrations and not seen to be unpinned."""
        return self._held

    def explain(self) -> None:
        """For an end that only reads, into memory of its own: what is pinned by now is no KV cache, but perhaps a buffer that is
        set aside with a read in flight."""
        with changing_pins:
            self.explained_bytes = self._pinned()

    @contextlib.contextmanager
    def registering(self, nbytes: int) -> Iterator[None]:
        """Around a registration of ``nbytes``. Pins that a failed release left count once, whoever takes them over."""
        with changing_pins:
            yield from self._registering(nbytes)

    def _registering(self, nbytes: int) -> Iterator[None]:
        before, whole = self._pinned(), False
        try:
            yield
            whole = True
        finally:
            found = min(nbytes, max(0, self._held + self._pinned() - before))
            not_ours = whole and not self._held and found < nbytes  # it pins nothing: the transport's own memory has grown
            self._held = 0 if not_ours else found
            self.tell(self._held)

    @contextlib.contextmanager
    def deregistering(self) -> Iterator[None]:
        """Around a deregistration. TransportError when it leaves anything pinned; waits up to a second for it."""
        with changing_pins:
            yield from self._deregistering()

    def _deregistering(self) -> Iterator[None]:
        before, did_pin = self._pinned(), self._held > 0
        try:
            yield
            deadline = time.monotonic() + SETTLE_S
            while self._pinned() > before - self._held and time.monotonic() < deadline:
                time.sleep(POLL_S)
        finally:
            self._held = max(0, self._held - max(0, before - self._pinned()))
            self.tell(self._held)
        self.explained_bytes = self._pinned() if did_pin and not self._held else 0
        if self._held:
            raise TransportError(
                f"{self._held} bytes are still pinned by this process (pid {os.getpid()}) after the transport let the KV cache "
                "go: unmapping it would give nothing back",
                transport="any",
                bytes=self._held,
            )


def _nothing(nbytes: int) -> None:
    return


class NoPins(PinWatch):
    """For device memory. Pins of host memory come and go with images and say nothing about it."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)
