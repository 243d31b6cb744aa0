"""What a piece of code leaves in this process. Counts would not do: other tests' threads end and close things meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator

SETTLE_S = 10.0  # threads that were told to end may take a moment


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = _descriptors()
    yield
    _settle("descriptors", lambda: _descriptors() - before)


@contextlib.contextmanager
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    _settle("threads", lambda: set(threading.enumerate()) - before)


def _descriptors() -> set[tuple[str, str]]:
    """Number and what it is of; a pipe or a socket by its inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was the listing's own, or somebody's who closed it
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def _settle(what: str, left: Callable[[], Collection[object]]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while found := left():
        assert time.monotonic() < deadline, f"{what} left: {sorted(map(str, found))}"
        time.sleep(0.01)
