"""Two doors. ``/v1`` takes an API key when one is set; admin routes the admin token, or without one clients on this machine."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request

from torpor.connectors.auth import is_loopback
from torpor.server.config import ServerConfig
from torpor.web.errors import ApiError

# What a proxy adds. One on this machine would make every client of it a loopback client.
FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
CHALLENGE = {"WWW-Authenticate": "Bearer"}

Door = Callable[[Request], Awaitable[None]]


def api_door(config: ServerConfig) -> Door:
    async def check(request: Request) -> None:
        if config.api_key is not None:
            check_bearer(request, config.api_key, "an API key")

    return check


def admin_door(config: ServerConfig) -> Door:
    async def check(request: Request) -> None:
        if config.admin_token is not None:
            check_bearer(request, config.admin_token, "the admin token")
        else:
            check_local(request)

    return check


def check_bearer(request: Request, expected: str, what: str) -> None:
    """Compares in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise ApiError(
            401, f"this route needs {what}: Authorization: Bearer ...", code="missing_authorization", headers=CHALLENGE
        )
    if not hmac.compare_digest(given.strip().encode(), expected.encode()):
        raise ApiError(401, f"the given bearer token is not {what}", code="invalid_authorization", headers=CHALLENGE)


def check_local(request: Request) -> None:
    """The connection's own peer must be loopback, and neither a proxy nor a page in a browser may stand behind it."""
    if request.client is None or not is_loopback(request.client.host):
        raise _forbidden("without an admin token this route answers loopback clients only")
    if any(name in request.headers for name in FORWARDING_HEADERS):
        raise _forbidden("without an admin token this route answers no proxy")
    if "origin" in request.headers:
        raise _forbidden("without an admin token this route answers no web page")


def _forbidden(message: str) -> ApiError:
    return ApiError(403, f"{message}: set one (--admin-token-file)", code="admin_forbidden")
