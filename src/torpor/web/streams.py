"""Work that ends with its client: when the connection goes, the generator is closed, and closing it aborts the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ByteStream(Response):
    """Sends what ``content`` yields, closes it and awaits ``on_close``, whether it ended, the client left, or the server stops.

    They are closed in a task that is cancelled at most once. Starlette's own streams cancel again at every await, so a clean-up
    that awaits would never finish. ``on_close`` ends what ``content`` reads from: a generator that never started would not.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._content = content
        self._on_close = on_close
        self.status_code = status_code
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self._send_all(send))
        finally:
            await self._content.aclose()
            if self._on_close is not None:
                await self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._content:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event_stream(content: AsyncGenerator[bytes, None], on_close: Callable[[], Awaitable[None]] | None = None) -> ByteStream:
    """Server-sent events; ``x-accel-buffering`` keeps proxies from holding them back."""
    headers = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
    return ByteStream(content, headers=headers, on_close=on_close)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; ClientDisconnect after ``work`` was cancelled and has cleaned up. The body must have been read."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            await stop(doing)
            raise ClientDisconnect
        return doing.result()
    finally:
        await stop(leaving)
        await stop(doing)


async def stop(task: asyncio.Future[Any]) -> None:
    """Cancels once and waits for the clean-up; the task's own failure is not raised."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(content: AsyncGenerator[T, None]) -> T | None:
    """The first item, or None: an error before it can still choose the status. Closes the generator on failure."""
    try:
        return await anext(content)
    except StopAsyncIteration:
        return None
    except BaseException:
        await content.aclose()
        raise
