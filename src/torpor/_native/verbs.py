"""The system's RDMA verbs library, for a package that brings a copy of its own.

UCX inside NIXL's wheel is linked to a private copy of libibverbs. Providers (the user-space halves of RDMA drivers) are the
system's and announce themselves to the system's libibverbs, so the private copy finds no device: "network device is not
available". With the system's in the global scope before UCX is loaded, both are the same library (the providers' interface is
versioned).

Two copies of libnl-route come with that. Lazily bound, one of them would take itself into the other's lists and crash the process
when it exits (SIGSEGV in rtnl_tc_unregister). Loaded first and bound at once, as ``ctypes`` does, the private one keeps to
itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

LIBRARY = "libibverbs.so.1"


def share_system_verbs(private: Iterable[Path]) -> bool:
    """To be called before the package that has the ``private`` libraries loads its own verbs. False when the system has none."""
    for library in private:
        ctypes.CDLL(str(library))
    try:
        ctypes.CDLL(LIBRARY, ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
