"""What NIXL tells of its reads, added up."""

from __future__ import annotations

import threading

from torpor.connectors.base import TransferStats
from torpor.connectors.nixl_agent import ReadTelemetry


class Tally:
    """Of all agents of a transport. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads = self._descriptors = self._bytes = self._notices = 0
        self._post_s = self._transfer_s = 0.0

    def add(self, read: ReadTelemetry | None) -> None:
        """None: NIXL had nothing to tell of it."""
        if read is None:
            return
        with self._lock:
            self._reads += 1
            self._descriptors += read.descriptors
            self._bytes += read.nbytes
            self._post_s += read.post_s
            self._transfer_s += read.transfer_s

    def note(self, notices: int) -> None:
        with self._lock:
            self._notices += notices

    def snapshot(self) -> TransferStats:
        with self._lock:
            return TransferStats(
                reads=self._reads,
                descriptors=self._descriptors,
                bytes=self._bytes,
                post_s=self._post_s,
                transfer_s=self._transfer_s,
                notices=self._notices,
            )
