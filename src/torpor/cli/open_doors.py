"""What others can reach of a server that listens on more than this machine, in one line."""

from __future__ import annotations

from urllib.parse import urlsplit

from torpor.connectors.auth import is_loopback
from torpor.connectors.config import ConnectorConfig
from torpor.server.config import ServerConfig


def open_doors_of_server(config: ServerConfig, url: str) -> str | None:
    """None when nothing is open to other machines but the probes. ``url``: where it listens; a --host may be a name, or empty."""
    if config.api_key is not None or _is_ours_alone(url):
        return None
    admin = (
        "admin routes (/sleep, /wake_up, ...) answer this machine only, until --admin-token-file lets others in"
        if config.admin_token is None
        else "admin routes (/sleep, /wake_up, ...) need the admin token"
    )
    return f"{url} can be reached from other machines, and /v1 is open to all of them: set --api-key-file; {admin}"


def open_doors_of_router(url: str) -> str | None:
    """A router has no door of its own: it hands its clients' keys to the engines."""
    if _is_ours_alone(url):
        return None
    return (
        f"{url} can be reached from other machines, which may use every engine that was started without "
        "--api-key-file: set it on the engines; /stats and /metrics, with the engines' addresses, are open to all"
    )


def open_doors_of_connector(config: ConnectorConfig | None) -> str | None:
    """None for those whose peers prove the secret before they read anything."""
    if config is None or config.connector != "mooncake" or is_loopback(config.host):
        return None
    return (
        f"--kv-host {config.host}: Mooncake's own ports ask for no secret, and whoever reaches them reads the KV cache: use an "
        "interface of a network you trust, or --kv-connector nixl"
    )


def _is_ours_alone(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")
