"""The options of ``ConnectorConfig.extra``, checked at the door: reading them, and those of the connectors that pull."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass
from typing import TypeVar

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
    protocol: str = "tcp"  # mooncake: "tcp" or "rdma"
    device_name: str | None = None  # mooncake over RDMA: the device, several with commas; None: all of them
    backend: str = "UCX"  # nixl: NIXL's plugin; others than UCX work without sleep only
    staging_bytes: int = 32 << 20  # nixl, mooncake: of the buffer that bytes wait in until they are known to be right

    @classmethod
    def of(cls, config: ConnectorConfig, known: Set[str]) -> Options:
        """``known``: the transport's own options. ConfigurationError for others, and for values of another type or out of
        range."""
        return read_options(cls, config, {"connect_timeout_s", "handshake_timeout_s", "read_timeout_s", "max_peers"} | known)


Dataclass = TypeVar("Dataclass")


def read_options(kind: type[Dataclass], config: ConnectorConfig, known: Set[str]) -> Dataclass:
    """``config.extra`` as the frozen dataclass ``kind``, whose defaults say of what type a value must be. ConfigurationError for
    a name that is not ``known``, and for a value of another type or out of range."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in config.extra.items():
        if name not in known:
            raise ConfigurationError(
                f"connector {config.connector!r} has no option {name!r}; known: {', '.join(sorted(known))}",
                setting=name,
                value=value,
            )
        _check(name, value, defaults[name])
    return kind(**config.extra)


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
