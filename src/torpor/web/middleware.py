"""ASGI wrappers: a limit on request bodies, and a request id on every answer."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torpor.web.errors import plain_status_error

BODY_TIMEOUT_S = 120.0
SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class BodyLimit:
    """413 for a body over ``max_bytes``: from its Content-Length before a byte is read, or while it arrives in chunks. 408 for
    one that has not arrived after ``timeout_s``."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._refuse(send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        seen, arriving = 0, True
        deadline = time.monotonic() + self._timeout_s

        async def limited() -> Message:
            nonlocal seen, arriving
            if not arriving:  # then it is the client's leaving that is waited for
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self._timeout_s:g} s") from None
            arriving = bool(message.get("more_body"))
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise HTTPException(413, self._message)
            return message

        return limited

    @property
    def _message(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"

    async def _refuse(self, send: Send) -> None:
        body = json.dumps(plain_status_error(413, self._message).body).encode()
        # The unread rest of the body would be taken for the next request.
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class RequestId:
    """Every answer has X-Request-Id: the client's own if short and printable, else a new one. Also in ``scope["request_id"]``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if SAFE_ID.fullmatch(given) else secrets.token_hex(16).encode()
        scope["request_id"] = request_id.decode()

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [h for h in message.get("headers", []) if h[0].lower() != b"x-request-id"]
                message = {**message, "headers": [*headers, (b"x-request-id", request_id)]}
            await send(message)

        await self._app(scope, receive, tagged)
