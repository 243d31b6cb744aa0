"""Errors of the file system, translated where they enter: a bare OSError would count as a fault of ours, and name no file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torpor.errors import ModelError


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """What the system says of ``path`` (a disk that fails, a share that is gone, a closed folder), as a ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}", path=str(path)) from error
