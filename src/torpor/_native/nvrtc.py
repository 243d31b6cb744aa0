"""Finds NVIDIA's run-time compiler where pip puts it. The native library asks for it by name and gets what is loaded already."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")  # of the wheels for CUDA 13, and for 12 and before
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


@functools.cache
def load_nvrtc() -> Path | None:
    """The first one that loads, which is the one that PyTorch would use; None: there is at best the system's. Stays loaded."""
    for path in _candidates():
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path))
            return path
    return None


def _candidates() -> Iterator[Path]:
    for entry in sys.path:
        for folder in _FOLDERS:
            for name in _NAMES:
                path = Path(entry, folder, name)
                if path.is_file():
                    yield path
