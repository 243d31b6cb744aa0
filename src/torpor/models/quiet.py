"""transformers without its progress bars and notes on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import transformers


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors still come as exceptions; what is going on is told by our own progress callbacks."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
