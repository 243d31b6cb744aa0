"""Who may touch an import: any number of reads, or the one who drops it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Uses:
    """Unlike a lock, a use may end on another thread than began it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reads = 0
        self._alone = False

    def begin(self) -> bool:
        """Whether a read may go on: then ``end`` must follow. Waits for nothing."""
        with self._changed:
            if self._alone:
                return False
            self._reads += 1
            return True

    def end(self) -> None:
        with self._changed:
            self._reads -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Waits while somebody is alone with the import."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._reads += 1
        try:
            yield
        finally:
            self.end()

    @contextlib.contextmanager
    def alone(self, timeout_s: float | None = None) -> Iterator[bool]:
        """Waits for every read to end. False: one did not in time, and nothing is held."""
        with self._changed:
            held = self._changed.wait_for(lambda: not (self._reads or self._alone), timeout_s)
            self._alone |= held
        try:
            yield held
        finally:
            if held:
                with self._changed:
                    self._alone = False
                    self._changed.notify_all()
