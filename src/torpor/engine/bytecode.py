"""Python's compiled modules, where an installation keeps none.

Images are often built with PYTHONDONTWRITEBYTECODE, or their packages cannot be written to. Then every start compiles the
thousands of modules that torch and transformers bring: on an H200 machine 12 of a start's 16 seconds.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path

_LARGEST = ("torch", "transformers", "sympy")  # stand for the installation: one may have been imported where it was made


def keep_bytecode(cache_dir: Path) -> Path | None:
    """From now on this process keeps compiled modules in a folder of ``cache_dir``, and finds them there. Returns it; None, and
    nothing is changed, where the installation has its own, somebody chose another place already, or the folder is not ours
    alone: what lies there is run."""
    if sys.pycache_prefix is not None or all(map(_has_bytecode, _LARGEST)):
        return None
    folder = cache_dir / "bytecode"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            return None
    except OSError:
        return None
    sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False
    return folder


def _has_bytecode(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is None or spec.origin is None or Path(importlib.util.cache_from_source(spec.origin)).exists()


def _is_private(folder: Path) -> bool:
    status = folder.stat(follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
