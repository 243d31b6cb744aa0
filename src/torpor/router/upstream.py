"""One request to one engine: open it, see its status and first bytes, pass the rest on, and remember how the engine did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from starlette.responses import Response

from torpor.errors import CapacityError, PeerError
from torpor.router.backends import Backend
from torpor.router.health import error_of, state_word
from torpor.web.errors import to_http
from torpor.web.streams import ByteStream, stop

T = TypeVar("T")


class EngineSilent(Exception):
    """It was given up: its probes have failed for ``silence_timeout_s``, or the router stops."""


FAILURES = (httpx.HTTPError, asyncio.TimeoutError, EngineSilent)

PASSED_ON = ("content-type", "retry-after", "www-authenticate", "cache-control", "x-accel-buffering")
RETRYABLE = (429, 502, 503, 504)  # not 500: what broke one engine may be the request


@dataclass(frozen=True, slots=True)
class Call:
    """What goes to an engine."""

    path: str
    body: bytes
    headers: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def refused_hand_off(self) -> bool:
        return self.status == 400 and str(error_of(self.body).get("param") or "").startswith("kv_transfer_params")

    def response(self) -> Response:
        return Response(self.body, self.status, headers=self.headers)


class Stream:
    """An answer whose first bytes are here. Whoever holds it calls ``response`` or ``aclose``."""

    def __init__(
        self, backend: Backend, answer: httpx.Response, first: bytes, rest: AsyncIterator[bytes], held: ExitStack
    ) -> None:
        self._backend = backend
        self._answer = answer
        self._first = first
        self._rest = rest
        self._held = held

    async def aclose(self) -> None:
        await self._answer.aclose()
        self._held.close()

    def response(self, read_timeout_s: float) -> ByteStream:
        body = self._relay(read_timeout_s)
        return ByteStream(body, self._answer.status_code, passed_headers(self._answer), on_close=self.aclose)

    async def _relay(self, read_timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The engine's bytes, cut between events, so that what breaks off in the middle of one can still end well-formed."""
        pending = self._first
        try:
            while True:
                cut = pending.rfind(b"\n\n") + 2
                if cut > 1:
                    yield pending[:cut]
                    pending = pending[cut:]
                pending += await within(read_timeout_s, anext(self._rest), self._backend)
        except StopAsyncIteration:
            if pending:
                yield pending
        except FAILURES as error:
            self._backend.saw_failure(words(error))
            lost = PeerError(f"the engine {self._backend.url} broke off: {words(error)}", peer=self._backend.url)
            yield b"data: " + json.dumps(to_http(lost).body).encode() + b"\n\ndata: [DONE]\n\n"


async def ask(client: httpx.AsyncClient, backend: Backend, call: Call, timeout_s: float) -> Whole:
    """The whole answer within ``timeout_s``. PeerError when there is none, CapacityError when no connection was free for it."""
    with backend.busy():
        try:
            posted = client.post(backend.url + call.path, content=call.body, headers=dict(call.headers))
            answer = await within(timeout_s, posted, backend)
        except httpx.PoolTimeout as error:
            raise no_connection() from error
        except FAILURES as error:
            raise _failed(backend, error) from error
    return _seen(backend, answer)


async def open_stream(client: httpx.AsyncClient, backend: Backend, call: Call, timeout_s: float) -> Whole | Stream:
    """A stream once its first bytes are here, or an answer that is none, read whole. PeerError when there is neither in time,
    CapacityError as ``ask``."""
    with ExitStack() as held:
        held.enter_context(backend.busy())
        try:
            opened = await within(timeout_s, _open(client, backend, call), backend)
        except httpx.PoolTimeout as error:
            raise no_connection() from error
        except FAILURES as error:
            raise _failed(backend, error) from error
        if opened is None:
            raise _failed(backend, httpx.RemoteProtocolError("the stream ended before it began"))
        answer, first, rest = opened
        if rest is None:
            return _seen(backend, answer)
        backend.saw_answer()
        return Stream(backend, answer, first, rest, held.pop_all())


async def _open(
    client: httpx.AsyncClient, backend: Backend, call: Call
) -> tuple[httpx.Response, bytes, AsyncIterator[bytes] | None] | None:
    request = client.build_request("POST", backend.url + call.path, content=call.body, headers=dict(call.headers))
    answer = await client.send(request, stream=True)
    try:
        if answer.status_code != 200 or not answer.headers.get("content-type", "").startswith("text/event-stream"):
            await answer.aread()
            return answer, b"", None
        rest = answer.aiter_raw()
        async for first in rest:
            return answer, first, rest
    except BaseException:
        await answer.aclose()
        raise
    await answer.aclose()
    return None


def _seen(backend: Backend, answer: httpx.Response) -> Whole:
    """Remembers what the answer says of the engine."""
    if answer.status_code < 500:
        backend.saw_answer()
    elif answer.status_code != 503:
        backend.saw_failure(f"HTTP {answer.status_code}")
    elif error_of(answer.content).get("code") != "over_capacity":
        backend.saw_not_ready(state_word(answer))
    return Whole(answer.status_code, passed_headers(answer), answer.content)


def _failed(backend: Backend, error: Exception) -> PeerError:
    backend.saw_failure(words(error))
    return PeerError(f"the engine {backend.url} did not answer: {words(error)}", peer=backend.url)


def no_connection() -> CapacityError:
    """Requests of ours have all of them. That says nothing of the engine, which is asked for nothing."""
    return CapacityError(
        "all of the router's connections to engines are in use: retry later, or raise max_connections", setting="max_connections"
    )


def words(error: Exception) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "timed out"
    if isinstance(error, EngineSilent):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def passed_headers(answer: httpx.Response) -> dict[str, str]:
    return {k: answer.headers[k] for k in PASSED_ON if k in answer.headers}


async def within(seconds: float, work: Awaitable[T], backend: Backend) -> T:
    """asyncio.TimeoutError after ``seconds``, EngineSilent when the engine is lost meanwhile; the work is cancelled and has
    cleaned up by then."""
    doing, lost = asyncio.ensure_future(work), backend.lost
    both: set[asyncio.Future[Any]] = {doing, lost}
    try:
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise EngineSilent(lost.result()) if lost.done() else asyncio.TimeoutError
    finally:
        if not doing.done():
            await stop(doing)
