"""The options of ``lmcache``, checked at the door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torpor.connectors.config import ConnectorConfig
from torpor.connectors.lmcache_engine import Remote
from torpor.connectors.options import read_options
from torpor.errors import ConfigurationError

SCHEMES = ("lm://", "fs://")
STORE_OPTIONS = {"host_bytes", "remote_url", "remote_timeout_s"}
PAIR_OPTIONS = {"pd_peer", "pd_buffer_device", "pd_buffer_bytes", "pd_wait_s"}
DEVICES = ("cpu", "cuda")
HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a decode engine is in LMCache's P/D mode: handshakes of NIXL's agents come to one port, requests for room to the
    other."""

    host: str
    init_port: int
    alloc_port: int

    @property
    def label(self) -> str:
        """As LMCache calls a receiver."""
        return f"{self.host}{self.init_port}"


@dataclass(frozen=True, kw_only=True)
class LMCacheOptions:
    host_bytes: int = 1 << 30
    remote_url: str | None = None  # None: this process alone
    remote_timeout_s: float = 2.0  # lm: for one question to the server
    pd_peer: str | None = None  # "HOST:INIT_PORT:ALLOC_PORT" of the decode engine: it listens there, prefill engines push there
    pd_buffer_device: str = "cpu"  # where LMCache's staging buffer lies: "cpu", or "cuda" for the engine's own device
    pd_buffer_bytes: int = 256 << 20
    pd_wait_s: float = 5.0  # how long a decode engine waits for KV that was announced to it, and a prefill engine for its answers

    @classmethod
    def of(cls, config: ConnectorConfig) -> LMCacheOptions:
        """ConfigurationError names the option that is wrong, or of the other mode."""
        options = read_options(cls, config, STORE_OPTIONS | PAIR_OPTIONS)
        options._check_mode(set(config.extra))
        if options.remote_url is not None:
            _check_remote(options.remote_url, options.remote_timeout_s)
        if options.pd_peer is not None:
            _peer_of(options.pd_peer)
        if options.pd_buffer_device not in DEVICES:
            raise _wrong("pd_buffer_device", options.pd_buffer_device, f"must be one of {', '.join(DEVICES)}")
        return options

    def _check_mode(self, given: set[str]) -> None:
        others = STORE_OPTIONS if self.pd_peer is not None else PAIR_OPTIONS - {"pd_peer"}
        for name in sorted(given & others):
            needs = "is not for the P/D mode, which pd_peer turns on" if self.pd_peer is not None else "needs a pd_peer"
            raise _wrong(name, getattr(self, name), needs)

    @property
    def remote(self) -> Remote | None:
        return Remote(self.remote_url, self.remote_timeout_s) if self.remote_url is not None else None

    @property
    def peer(self) -> Peer | None:
        return None if self.pd_peer is None else _peer_of(self.pd_peer)


def _check_remote(url: str, timeout_s: float) -> None:
    if not url.startswith(SCHEMES):
        raise _wrong("remote_url", url, f"must begin with one of {', '.join(SCHEMES)}")
    if url.startswith("lm://"):
        try:
            Remote(url, timeout_s).address()
        except ValueError as error:
            raise _wrong("remote_url", url, str(error)) from error


def _peer_of(text: str) -> Peer:
    host, *ports = text.rsplit(":", 2)
    numbers = [int(port) for port in ports if port.isascii() and port.isdecimal() and 0 < int(port) <= HIGHEST_PORT]
    if not host or len(numbers) != 2 or numbers[0] == numbers[1]:
        raise _wrong("pd_peer", text, "must be HOST:INIT_PORT:ALLOC_PORT with two different ports")
    return Peer(host, *numbers)


def _wrong(setting: str, value: Any, says: str) -> ConfigurationError:
    return ConfigurationError(f"lmcache: {setting} {value!r} {says}", setting=setting, value=value)
