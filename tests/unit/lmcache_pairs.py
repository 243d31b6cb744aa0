"""What tests of LMCache's P/D mode share."""

from __future__ import annotations

import socket

PAIR_ITEMS = [
    "placement",
    "blocks end",
    "follow",
    "in-flight read",
    "late read",
    "peer crash",
    "double sleep",
    "failed release",
    "failed restore",
    "partial wake",
    "bytes flat",
    "resources flat",
]
"""Those that need one decode engine at a time, and no engine that is both."""


def free_peer() -> str:
    """A ``pd_peer``: this host and two ports that nobody has now."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    return ":".join(["127.0.0.1", *map(str, ports)])
