"""Who may talk on the control channel: proof of a shared secret by both sides, and session keys that sign every later frame.

Nothing is encrypted. A side that has a secret talks to nobody who does not prove it, and never falls back. The reader proves
itself first, so that somebody who scans ports learns nothing that depends on the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import ConfigurationError

MIN_SECRET_BYTES = 16
MOUNTED_SECRETS = Path("/run/secrets")


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


def exposure(path: str) -> str | None:
    """What is wrong when every user of this machine can read or write a file that holds a secret, with what to do.

    Not of what Docker and Kubernetes mount (/run/secrets, or any read-only mount): its modes, 0444 and 0644, are not the
    operator's to change, and nobody else is in the container. A group that may read it is somebody's choice: so a service gets a
    secret that is root's. A pipe (``<(...)``) has no readers but us."""
    try:
        found, whole = os.stat(path), Path(path).resolve()
        mounted = MOUNTED_SECRETS.resolve() in whole.parents or bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:  # whoever reads it says so
        return None
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & (stat.S_IROTH | stat.S_IWOTH) or mounted:
        return None
    mode = stat.S_IMODE(found.st_mode)
    return f"{path} holds a secret, and every user of this machine can get at it (mode {mode:o}): chmod 600 {path}"


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


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
