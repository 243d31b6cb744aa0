"""Room for descriptors: an exported KV cache has one per extent, and shells start processes with 1024 in all."""

from __future__ import annotations

import os
import resource
import threading

from torpor.errors import TransportError

SPARE = 128  # for sockets, files and whatever else the process opens meanwhile

_lock = threading.Lock()


def make_room(count: int) -> None:
    """Raises this process's limit, where that is needed and the system's own permits it, so that ``count`` more can be open.
    TransportError, with the number it takes."""
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = len(os.listdir("/proc/self/fd")) + count + SPARE
        if soft == resource.RLIM_INFINITY or wanted <= soft:
            return
        if hard != resource.RLIM_INFINITY and wanted > hard:
            raise TransportError(
                f"the KV cache's {count} pieces take more descriptors than this process may open: ulimit -n must be {wanted} "
                f"or more, it is {hard}; or choose larger extents",
                transport="ipc",
                setting="extent_bytes",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
