"""Who may talk on the control channel: proof of a shared secret by both sides, and session keys that sign every later frame.

Nothing is encrypted. A side that has a secret talks to nobody who does not prove it, and never falls back. The reader proves
itself first, so that somebody who scans ports learns nothing that depends on the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import ConfigurationError

MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """One key a direction, so that a frame cannot be sent back to its sender."""

    reader: bytes
    owner: bytes


def load_secret(path: str | None) -> bytes | None:
    """The file's content without white space at its ends. ConfigurationError when it is missing or shorter than 16 bytes."""
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"kv_secret_file {path!r} cannot be read: {error.strerror}", setting="kv_secret_file", value=path
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"kv_secret_file {path!r} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed "
            "(for example: openssl rand -hex 32)",
            setting="kv_secret_file",
            value=path,
        )
    return secret


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(host: str, secret: bytes | None) -> None:
    """ConfigurationError for an address that peers cannot be sent to, or one they reach from outside without a secret."""
    if host in ("", "0.0.0.0", "::", "*"):
        raise ConfigurationError(
            f"kv_host {host!r} is no address peers can connect to: name the one of the interface", setting="kv_host", value=host
        )
    if secret is None and not is_loopback(host):
        raise ConfigurationError(
            f"kv_host {host!r} can be reached from other machines: give both engines the same kv_secret_file",
            setting="kv_secret_file",
            value=None,
        )


def prove(secret: bytes, role: str, transcript: bytes) -> bytes:
    """role: "reader" or "owner"; transcript: the digest of the Hello and Challenge frames, which hold both nonces."""
    return hmac.digest(secret, b"torpor control 1 " + role.encode() + transcript, "sha256")


def proves(mac: bytes, secret: bytes, role: str, transcript: bytes) -> bool:
    return hmac.compare_digest(mac, prove(secret, role, transcript))


def transcript(hello: bytes, challenge: bytes) -> bytes:
    return hashlib.sha256(len(hello).to_bytes(4, "big") + hello + challenge).digest()


def session_keys(secret: bytes, transcript_digest: bytes) -> SessionKeys:
    return SessionKeys(
        prove(secret, "key of reader", transcript_digest),
        prove(secret, "key of owner", transcript_digest),
    )


def frame_mac(key: bytes, sequence: int, payload: bytes) -> bytes:
    """Signs a frame and its place in the order, so that none can be repeated, left out or moved unnoticed."""
    return hmac.digest(key, sequence.to_bytes(8, "big") + payload, "sha256")
