"""Results of threads' work, raised without keeping what the frames of an error hold."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def result_of(future: Future[T]) -> T:
    """``future.result()``. Give it one that no variable of the caller names, ``result_of(jobs.popleft())``: an error holds the
    frames of its traceback, and a frame that holds the future holds the error. Tensors in such a ring live, with their device
    memory, until a garbage collection comes by, whoever has caught the error and forgotten it."""
    error = future.exception()
    if error is None:
        return future.result()
    del future
    try:
        raise error
    finally:
        del error
