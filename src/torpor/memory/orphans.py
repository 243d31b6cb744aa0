"""Regions that outlive their memory's close because tensors still lie in them.

Taking them away would turn the next touch of such a tensor, or torch's own clean-up at exit, into a crash.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from torpor.errors import TorporError
from torpor.memory.pool import Pool
from torpor.memory.segment import Deaths, Segment


def adopt_orphans(deaths: Deaths, pools: Iterable[Pool], settle: Callable[[], None], finish: Callable[[], None] | None) -> None:
    """From now on a region goes when its last tensor has died and ``settle`` has waited for the kernels that may still use it;
    ``finish`` runs after the last region, at once when there is none. A region that does not go is tried again with the next."""
    orphans = _Orphans(deaths, {s for p in pools for s in p.segments}, settle, finish)
    deaths.after = orphans.reap
    orphans.reap()
    orphans.finish_if_done()


class _Orphans:
    """Works inside finalizers, since after a close there is no next call. No lock is waited for there: whoever finds it taken
    leaves the work to its holder, which looks again after it let go. The native library's own lock is held by no thread that
    waits for Python's."""

    def __init__(
        self, deaths: Deaths, segments: set[Segment], settle: Callable[[], None], finish: Callable[[], None] | None
    ) -> None:
        self._deaths = deaths
        self._segments = segments
        self._settle = settle
        self._finish = finish
        self._busy = threading.Lock()

    def reap(self) -> None:
        while self._deaths and self._busy.acquire(blocking=False):
            try:
                self._reap_all()
            finally:
                self._busy.release()

    def _reap_all(self) -> None:
        while (death := self._deaths.take()) is not None:
            segment, offset = death
            segment.layout.free(offset)
        for segment in [s for s in self._segments if s.layout.empty]:
            with contextlib.suppress(TorporError):
                self._settle()
                segment.region.destroy()
                self._segments.discard(segment)
        self.finish_if_done()

    def finish_if_done(self) -> None:
        if not self._segments and self._finish is not None:
            finish, self._finish = self._finish, None
            with contextlib.suppress(TorporError):
                finish()
