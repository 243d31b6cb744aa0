"""What tests of LMCache's P/D mode share."""

from __future__ import annotations

from torpor.demo.fleet import free_ports

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
    return ":".join(["127.0.0.1", *map(str, free_ports(2))])
