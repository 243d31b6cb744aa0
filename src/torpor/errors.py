"""Every exception torpor raises, sorted by whose fault it is.

    TorporError
    ├── ConfigurationError     a setting is wrong: fix it and start again       (also ValueError)
    │   ├── UnknownTagError    a tag that names no pool
    │   ├── ModelError         the model's files are missing, damaged or not supported
    │   └── ConnectorError     the connector is unknown, not installed, or refused
    ├── RequestError           one request is wrong; everybody else is served   (also ValueError)
    │   └── ContextLengthError its prompt is longer than the context
    ├── StateError             the call is wrong in the present state
    │   ├── AsleepError        the engine sleeps; retry after the wake
    │   └── SleepAborted       a deadline, a wake or a hook stopped a sleep; the engine is awake
    ├── CapacityError          there is not enough of something; retry later
    │   ├── DeviceMemoryError  device memory: bytes needed, bytes free
    │   └── HostMemoryError    host memory for images: bytes needed, bytes free
    ├── HookError              a before_unmap or after_map hook raised; names the hook
    ├── DeviceError            a driver call failed
    ├── TransportError         a transport failed to move or register memory
    ├── PeerError              the other engine's fault: silent, gone, or wrong
    │   ├── HandshakeError     the peer is not who or what it must be
    │   └── StaleEpochError    the peer's memory was mapped anew since the handshake
    ├── EngineDeadError        the core process is gone
    └── BugError               ours: please report it

Foreign exceptions are translated where they enter and travel as ``__cause__``.
"""

from __future__ import annotations

from typing import Any


class TorporError(Exception):
    """The base of all. ``fields`` holds what a program needs of the message."""

    fields: dict[str, Any]

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Fields read as attributes: error.bytes_needed. Only called where normal lookup failed.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


class ConfigurationError(TorporError, ValueError):
    """Fields by convention: ``setting`` (what to change), ``value`` (what was given)."""


class UnknownTagError(ConfigurationError):
    """Fields: ``tag``, ``known``."""


class ModelError(ConfigurationError):
    """Fields: ``path``."""


class ConnectorError(ConfigurationError):
    """Fields: ``connector``."""


class RequestError(TorporError, ValueError):
    """Fields: ``param``, the field of the request that is wrong."""


class ContextLengthError(RequestError):
    """Fields: ``param``, ``limit``, ``setting`` (what would allow it), ``tokens`` where they were counted."""


class StateError(TorporError):
    """Fields: ``state`` (the present one)."""


class AsleepError(StateError):
    """Fields: ``retry_after_s``, ``state``."""


class SleepAborted(StateError):
    """Fields: ``reason``, ``waiting_for`` (names of what did not finish)."""


class CapacityError(TorporError):
    """Fields: ``bytes_needed``, ``bytes_free`` where bytes are what is short."""


class DeviceMemoryError(CapacityError):
    pass


class HostMemoryError(CapacityError):
    pass


class HookError(TorporError):
    """Fields: ``hook``, ``tag``, ``phase`` ("before_unmap" or "after_map")."""


class DeviceError(TorporError):
    """Fields: ``operation``, ``code`` (the driver's, an errno on the host)."""


class TransportError(TorporError):
    """Fields: ``transport``."""


class PeerError(TorporError):
    """Fields: ``peer``."""


class HandshakeError(PeerError):
    pass


class StaleEpochError(PeerError):
    """Fields: ``expected``, ``found`` (epochs as text)."""


class EngineDeadError(TorporError):
    pass


class BugError(TorporError):
    pass


class RemoteError:
    """Exceptions as plain data, for the wire between processes. A subclass of a module's own travels as its parent here."""

    @staticmethod
    def known() -> dict[str, type[TorporError]]:
        """The classes of the tree above, by name."""
        return _TREE

    @staticmethod
    def encode(error: BaseException) -> dict[str, Any]:
        """``{"type", "message", "fields"}``; anything that is not ours becomes a BugError."""
        if isinstance(error, TorporError):
            kind, fields = next(k.__name__ for k in type(error).__mro__ if k.__module__ == __name__), error.fields
        else:
            kind, fields = BugError.__name__, {"original": type(error).__name__}
        plain = {k: v if isinstance(v, (str, int, float, bool, type(None))) else str(v) for k, v in fields.items()}
        return {"type": kind, "message": str(error) or type(error).__name__, "fields": plain}

    @staticmethod
    def decode(data: dict[str, Any]) -> TorporError:
        kind = _TREE.get(data["type"], BugError)
        return kind(data["message"], **data.get("fields", {}))


_TREE: dict[str, type[TorporError]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, TorporError)
}
