"""The options of ``ConnectorConfig.extra`` that ``ipc`` and ``nixl`` know, checked at the door."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass

from torpor.connectors.config import ConnectorConfig
from torpor.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Options:
    connect_timeout_s: float = 2.0
    handshake_timeout_s: float = 5.0
    read_timeout_s: float = 10.0  # of the blocks of one request
    max_peers: int = 64  # connections an owner holds, and engines a reader reads from
    socket_dir: str | None = None  # ipc: where the sockets of this user's engines are; None: a folder of the system's
    ucx_tls: str | None = None  # nixl: the one transport UCX may use ("tcp", "rc"); None: UCX chooses
    backend: str = "UCX"  # nixl: NIXL's plugin; others than UCX work without sleep only
    staging_bytes: int = 32 << 20  # nixl: of the buffer that bytes wait in until they are known to be right

    @classmethod
    def of(cls, config: ConnectorConfig, known: Set[str]) -> Options:
        """``known``: the transport's own options. ConfigurationError for others, and for values of another type or out of
        range."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        mine = {"connect_timeout_s", "handshake_timeout_s", "read_timeout_s", "max_peers"} | known
        for name, value in config.extra.items():
            if name not in mine:
                raise ConfigurationError(
                    f"connector {config.connector!r} has no option {name!r}; known: {', '.join(sorted(mine))}",
                    setting=name,
                    value=value,
                )
            _check(name, value, fields[name].default)
        return cls(**config.extra)


def _check(name: str, value: object, default: object) -> None:
    if isinstance(default, str):
        good = isinstance(value, str) and value != ""
    elif default is None:
        good = isinstance(value, str | None) and value != ""
    elif isinstance(default, int):
        good = type(value) is int and value > 0
    else:
        good = type(value) in (int, float) and 0 < float(str(value)) < 1e6
    if not good:
        raise ConfigurationError(f"connector option {name} cannot be {value!r}", setting=name, value=value)
