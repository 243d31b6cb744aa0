from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from torpor.errors import ConfigurationError
from torpor.web.numbers import check_above_zero, check_finite

Policy = Literal["least_loaded", "round_robin"]
POLICIES: tuple[Policy, ...] = ("least_loaded", "round_robin")
ABOVE_ZERO = (
    "connect_timeout_s",
    "prefill_timeout_s",
    "first_byte_timeout_s",
    "read_timeout_s",
    "health_interval_s",
    "health_timeout_s",
    "silence_timeout_s",
    "max_body_bytes",
    "max_connections",
)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Engines by URL (``http://host:port``). Every wait has a bound: nothing a backend does keeps a client for ever."""

    prefill: tuple[str, ...] = ()  # none: decode engines prefill by themselves
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    policy: Policy = "least_loaded"
    connect_timeout_s: float = 2.0
    prefill_timeout_s: float = 60.0  # the whole prefill; then a decode engine does it
    first_byte_timeout_s: float = 300.0  # of a stream; of the whole answer when it is not streamed
    read_timeout_s: float = 120.0  # between two pieces of a stream
    health_interval_s: float = 0.5
    health_timeout_s: float = 2.0
    silence_timeout_s: float = 10.0  # requests to an engine whose probes fail for so long are given up
    backoff_s: float = 1.0  # how long an engine that failed is left alone; doubles with every failure in a row
    max_backoff_s: float = 30.0
    max_body_bytes: int = 32 << 20
    max_connections: int = 2048
    drain_s: float = 30.0
    access_log: bool = False

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigurationError("a router needs at least one --decode URL", setting="--decode", value="")
        if self.policy not in POLICIES:
            raise ConfigurationError(
                f"unknown --policy {self.policy!r}; known: {', '.join(POLICIES)}", setting="--policy", value=self.policy
            )
        for flag, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            for url in urls:
                check_url(flag, url)
            if len(set(urls)) != len(urls):
                raise ConfigurationError(f"{flag} names an engine twice: {', '.join(urls)}", setting=flag, value=", ".join(urls))
        check_above_zero(self, ABOVE_ZERO)
        check_finite(self, ("backoff_s", "max_backoff_s", "drain_s"))


def check_url(flag: str, url: str) -> None:
    """ConfigurationError unless ``url`` is http(s)://host[:port] and nothing more."""
    try:
        parts = urlsplit(url)
        plain = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.path in ("", "/")
            and not parts.query
            and not parts.fragment
        )
        _ = parts.port
    except ValueError:
        plain = False
    if not plain:
        raise ConfigurationError(f"{flag} {url!r} is not an engine's address; give http://HOST:PORT", setting=flag, value=url)
