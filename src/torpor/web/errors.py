"""One table from torpor.errors to HTTP, and OpenAI's error shape: ``{"error": {"message", "type", "param", "code"}}``.

An error's fields (bytes needed, tag, state, ...) travel beside these as ``details``, for programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torpor import errors
from torpor.web.wording import http_message

INVALID = "invalid_request_error"
SERVER = "server_error"
UNAVAILABLE = "service_unavailable_error"
DEFAULT_RETRY_AFTER_S = 1.0
MAX_TEXT = 2000  # characters of a message, and of a text among the details


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    status: int
    type: str
    code: str
    retry: bool = False  # send Retry-After: the same request may succeed later


TABLE: dict[type[errors.TorporError], ErrorStatus] = {
    errors.ConfigurationError: ErrorStatus(400, INVALID, "invalid_value"),
    errors.UnknownTagError: ErrorStatus(400, INVALID, "unknown_tag"),
    errors.ModelError: ErrorStatus(500, SERVER, "model_error"),
    errors.ConnectorError: ErrorStatus(409, INVALID, "connector_refused"),
    errors.RequestError: ErrorStatus(400, INVALID, "invalid_value"),
    errors.ContextLengthError: ErrorStatus(400, INVALID, "context_length_exceeded"),  # clients of OpenAI's look for it
    errors.StateError: ErrorStatus(409, INVALID, "wrong_state"),
    errors.AsleepError: ErrorStatus(503, UNAVAILABLE, "engine_asleep", retry=True),
    errors.SleepAborted: ErrorStatus(409, UNAVAILABLE, "sleep_aborted"),
    errors.CapacityError: ErrorStatus(503, UNAVAILABLE, "over_capacity", retry=True),
    errors.DeviceMemoryError: ErrorStatus(507, SERVER, "device_memory_short"),
    errors.HostMemoryError: ErrorStatus(507, SERVER, "host_memory_short"),
    errors.HookError: ErrorStatus(503, SERVER, "hook_failed"),
    errors.DeviceError: ErrorStatus(500, SERVER, "device_error"),
    errors.TransportError: ErrorStatus(503, SERVER, "transport_error"),
    errors.PeerError: ErrorStatus(503, SERVER, "peer_error"),
    errors.HandshakeError: ErrorStatus(503, SERVER, "handshake_refused"),
    errors.StaleEpochError: ErrorStatus(503, SERVER, "stale_epoch"),
    errors.EngineDeadError: ErrorStatus(503, SERVER, "engine_dead"),
    errors.BugError: ErrorStatus(500, SERVER, "internal_error"),
    errors.TorporError: ErrorStatus(500, SERVER, "internal_error"),
}

TYPE_OF_STATUS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODE_OF_STATUS = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "body_too_large",
}


class ApiError(Exception):
    """An error that only HTTP knows: authentication, an unknown model, an unsupported field."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class HttpError:
    """What goes on the wire for one exception."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def error_body(
    message: str, kind: str, code: str | None, param: str | None = None, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    body: dict[str, Any] = {"message": clipped(message), "type": kind, "param": param and clipped(param), "code": code}
    if details:
        body["details"] = details
    return {"error": body}


def clipped(text: str) -> str:
    """A name of a million characters that is wrong need not be sent back whole."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


def status_of(error: errors.TorporError) -> ErrorStatus:
    """The nearest ancestor's row."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def plain_status_error(status: int, message: str, code: str | None = None, param: str | None = None) -> HttpError:
    kind = TYPE_OF_STATUS.get(status, INVALID if status < 500 else SERVER)
    return HttpError(status, error_body(message, kind, code or CODE_OF_STATUS.get(status), param), {})


def to_http(error: BaseException) -> HttpError:
    """Any exception as an answer. What is not ours becomes a 500 that gives away nothing but its type."""
    if isinstance(error, ApiError):
        plain = plain_status_error(error.status, error.message, error.code, error.param)
        return HttpError(plain.status, plain.body, error.headers)
    if not isinstance(error, errors.TorporError):
        message = f"internal error ({type(error).__name__}); the server's log has it"
        return HttpError(500, error_body(message, SERVER, "internal_error"), {})
    row = status_of(error)
    details = {k: _plain(v) for k, v in error.fields.items() if k != "param"}
    headers = {"Retry-After": retry_after(error)} if row.retry else {}
    return HttpError(row.status, error_body(http_message(error), row.type, row.code, _param(error), details), headers)


def retry_after(error: errors.TorporError) -> str:
    """Whole seconds, at least one: HTTP's Retry-After has no fractions."""
    seconds = error.fields.get("retry_after_s")
    return str(max(1, math.ceil(seconds if isinstance(seconds, (int, float)) else DEFAULT_RETRY_AFTER_S)))


def _param(error: errors.TorporError) -> str | None:
    if isinstance(error, errors.UnknownTagError):
        return "tags"
    name = error.fields.get("param") or error.fields.get("setting")
    return name if isinstance(name, str) else None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return clipped(str(value))
    if isinstance(value, (int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return clipped(str(value))
