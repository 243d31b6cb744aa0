"""The garbage collector of a process that serves: out of the way of its steps.

A step of 1,000 sequences makes thousands of small objects that live until the next one. With Python's thresholds the collector
takes them for the beginnings of something and looks through the whole heap for it: with 11,000 requests 110 ms, every hundredth
step (benchmarks/scheduler_steps.py). They die by their reference counts; what is in cycles is little, and found later.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = (50_000, 20, 100)


def settle() -> None:
    """What is here now stays for ever, and is not looked at again; what comes is looked at seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Nothing is looked at in the block; on again after it if it was before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
