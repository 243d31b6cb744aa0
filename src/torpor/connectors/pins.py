"""P4a: a release is believed when it is seen. A transport's own cache may keep pages pinned that it was told to drop.

Host memory only: what a network card or a peer has of device memory shows in no count of the process. There an import is seen by
the fence that goes with it (``ipc``), and a transport's word is all there is for its own registration (``nixl``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from torpor.errors import TransportError
from torpor.memory.procfs import pinned_bytes

SETTLE_S = 1.0  # a driver may unpin a moment after the call that asked for it
POLL_S = 0.01


class PinWatch:
    """Remembers by how much a registration raised what this process has pinned (VmPin), and asks it back."""

    def __init__(self, pinned: Callable[[], int] = pinned_bytes) -> None:
        self._pinned = pinned
        self._before = 0

    @contextlib.contextmanager
    def watching(self, *, anew: bool = True) -> Iterator[None]:
        """Around a registration. What was pinned before it is not asked back; not ``anew``: before the first one whose pins were
        not seen to be gone, since those of a failed release would count as somebody else's."""
        if anew:
            self._before = self._pinned()
        yield

    def check_unpinned(self) -> None:
        """TransportError when more stays pinned than before the registration. Waits up to a second for it."""
        deadline = time.monotonic() + SETTLE_S
        while (left := self._pinned() - self._before) > 0:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"{left} bytes are still pinned by this process (pid {os.getpid()}) after the transport let the KV cache go: "
                    "unmapping it would give nothing back",
                    transport="any",
                    bytes=left,
                )
            time.sleep(POLL_S)


class NoPins(PinWatch):
    """For device memory. Pins of host memory come and go with images and say nothing about it."""

    def check_unpinned(self) -> None:
        return
