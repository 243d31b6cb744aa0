"""The registered connectors, and what tests over all of them must know: how an engine gets one, and what is wrong for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from torpor.connectors.registry import KNOWN
from torpor.errors import ConnectorError
from torpor.testing.connectors import Subject
from torpor.testing.connectors.engine import SuiteEngine

Wrong = tuple[dict[str, Any], str]  # options, and what the error must say


@dataclass(frozen=True)
class Case:
    """``packages``: what must be importable, one of them. ``install``: the extra that brings them. ``wrong``: options that are
    refused, with what the error must say."""

    extra: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    install: str = ""
    wrong: tuple[Wrong, ...] = ()


SOCKETS = {"socket_dir": "{folder}"}
CASES: dict[str, Case] = {
    "ipc": Case(extra=SOCKETS, wrong=(({"socket_dir": ""}, "socket_dir"), ({"read_timeout_s": "soon"}, "read_timeout_s"))),
    "nixl": Case(
        packages=("nixl_cu13", "nixl"),
        install="nixl",
        wrong=(
            ({"ucx_tls": 5}, "ucx_tls"),
            ({"ucx_tls": "pigeon"}, r"ucx_tls 'pigeon'.* one or more of:.*\btcp\b"),
            ({"ucx_tls": "tcp,rc"}, r"ucx_tls is one transport.*UCX_TLS"),
            ({"staging_bytes": 0}, "staging_bytes"),
        ),
    ),
    "multi": Case(
        extra={"connectors": [{"kv_connector": "ipc", "kv_connector_extra_config": SOCKETS}]},
        wrong=(({"connectors": []}, "connectors"), ({"connectors": ["pigeon"]}, "pigeon")),
    ),
    "mooncake": Case(
        packages=("mooncake", "mooncake.engine"),
        install="mooncake",
        wrong=(({"protocol": "pigeon"}, "protocol"), ({"staging_bytes": 0}, "staging_bytes")),
    ),
    "lmcache": Case(
        packages=("lmcache", "lmcache.v1.cache_engine"),
        install="lmcache",
        wrong=(
            ({"remote_url": "pigeon://x"}, "remote_url"),
            ({"pd_peer": "somewhere"}, "pd_peer"),
            ({"host_bytes": 1}, "host_bytes"),
        ),
    ),
    "offload": Case(wrong=(({"host_bytes": 1}, "host_bytes"), ({"disk_bytes": 1 << 30}, "disk_dir"))),
}
NAMES = tuple(KNOWN)


def case(name: str) -> Case:
    return CASES.get(name, Case())


def engine(name: str, folder: str, extra: dict[str, Any] | None = None, role: Any = "both", **settings: Any) -> SuiteEngine:
    """Of this connector, with these options instead of the usual ones of the same name."""
    options = {**case(name).extra, **(extra or {})}
    return SuiteEngine(Subject.of(name, extra=options), role, f"E-{name}", folder, **settings)


def needs(name: str, folder: str) -> None:
    """Skips where its package is not installed, or cannot be loaded."""
    if case(name).packages:
        try:
            engine(name, folder).close()
        except ConnectorError as error:
            pytest.skip(str(error))
