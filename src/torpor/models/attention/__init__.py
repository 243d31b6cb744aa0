"""Attention over paged KV. ``get_backend`` knows the backends by name; ``base`` is the contract."""

from __future__ import annotations

from torpor.errors import ConfigurationError
from torpor.models.attention.base import (
    AttentionBackend,
    AttentionLayer,
    AttentionStep,
    LayerEvents,
    PagedBatch,
    StepContext,
)
from torpor.models.attention.flashinfer import FlashInferBackend
from torpor.models.attention.sdpa import SdpaBackend
from torpor.models.attention.triton_backend import TritonBackend
from torpor.models.attention.varlen import VarlenBackend

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionStep",
    "LayerEvents",
    "PagedBatch",
    "StepContext",
    "backends",
    "get_backend",
    "register_backend",
]

_BACKENDS: dict[str, type[AttentionBackend]] = {}


def register_backend(backend: type[AttentionBackend]) -> None:
    """Make ``backend`` known by its ``name``. A name is taken once."""
    if _BACKENDS.setdefault(backend.name, backend) is not backend:
        raise ConfigurationError(f"attention backend {backend.name!r} is registered already", setting="attention_backend")


def backends(device_type: str) -> tuple[str, ...]:
    """Names of the backends for the device, the preferred one first, whether or not what they need is installed."""
    return tuple(name for name, b in _BACKENDS.items() if not b.device_types or device_type in b.device_types)


def get_backend(name: str, device_type: str, *, deterministic: bool = False) -> AttentionBackend:
    """``auto`` is the first of ``backends`` that can run. ConfigurationError for a name that is unknown on the device, for one
    that lacks what it needs, and for one that cannot be ``deterministic``."""
    known = backends(device_type)
    if name == "auto":
        return next(_BACKENDS[n] for n in known if _BACKENDS[n].missing() is None)(deterministic=deterministic)
    if name not in known:
        why = f"needs {' or '.join(_BACKENDS[name].device_types)}" if name in _BACKENDS else "is not known"
        raise ConfigurationError(
            f"attention_backend {name!r} {why}; on {device_type} there are auto, {', '.join(known)}",
            setting="attention_backend",
            value=name,
        )
    missing = _BACKENDS[name].missing()
    if missing is not None:
        raise ConfigurationError(
            f"attention_backend {name!r} cannot run here: {missing}", setting="attention_backend", value=name
        )
    return _BACKENDS[name](deterministic=deterministic)


for _backend in (TritonBackend, SdpaBackend, FlashInferBackend, VarlenBackend):
    register_backend(_backend)
