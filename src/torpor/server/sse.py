"""Server-sent events of OpenAI's streams: ``data:`` lines, an error as one event, ``[DONE]`` at the end."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from torpor.errors import TorporError
from torpor.server.replies import Reply
from torpor.web.errors import to_http

log = logging.getLogger("torpor.server")
DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


async def as_events(replies: AsyncGenerator[Reply, None]) -> AsyncGenerator[bytes, None]:
    """Every stream ends with ``[DONE]``; one that fails says why just before, since its status line is long gone."""
    try:
        async with aclosing(replies):
            async for reply in replies:
                yield event(reply.json_bytes())
    except Exception as error:
        if not isinstance(error, TorporError):
            log.exception("a stream failed")
        yield event(json.dumps(to_http(error).body).encode())
    yield DONE
