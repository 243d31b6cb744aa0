"""``/v1``: models, completions, chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from torpor.server.auth import api_door
from torpor.server.chat import ChatAnswer
from torpor.server.completions import CompletionAnswer
from torpor.server.context import ServerContext
from torpor.server.documents import errors
from torpor.server.replies import Chat, Completion, Model, ModelList, Reply
from torpor.server.sse import as_events
from torpor.server.wire import ChatBody, CompletionBody
from torpor.web.streams import event_stream, first_of, until_disconnect

SSE_DOC: dict[str, Any] = {"text/event-stream": {}}  # a schema would be taken for that of one event, or of the whole stream


class Answer(Protocol):
    async def whole(self) -> Reply: ...

    def chunks(self) -> AsyncGenerator[Reply, None]: ...


def openai_routes(context: ServerContext) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["openai"], dependencies=[Depends(api_door(context.config))])
    failures = errors(400, 401, 404, 409, 413, 500, 503)
    alive = [Depends(context.require_responsive)]

    @routes.get("/models", response_model=ModelList, responses=errors(401))
    async def models() -> ModelList:
        """The served model, asleep or not."""
        return ModelList(object="list", data=[_model(context)])

    @routes.get("/models/{model:path}", response_model=Model, responses=errors(401, 404))
    async def model(model: str) -> Model:
        context.check_model(model)
        return _model(context)

    @routes.post("/completions", dependencies=alive, response_model=Completion, responses={**failures, 200: {"content": SSE_DOC}})
    async def completions(request: Request, body: CompletionBody) -> Response:
        """OpenAI's completions, with vLLM's sampling extras and ``kv_transfer_params``."""
        answer = await asyncio.to_thread(CompletionAnswer, context, body)
        return await respond(request, answer, bool(body.stream))

    @routes.post("/chat/completions", dependencies=alive, response_model=Chat, responses={**failures, 200: {"content": SSE_DOC}})
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """OpenAI's chat completions, with vLLM's sampling extras and ``kv_transfer_params``."""
        answer = await asyncio.to_thread(ChatAnswer, context, body)
        return await respond(request, answer, bool(body.stream))

    return routes


async def respond(request: Request, answer: Answer, stream: bool) -> Response:
    """A failure before the first token still gets its own status, also for a stream. A client that leaves ends the work."""
    if not stream:
        reply = await until_disconnect(request.receive, answer.whole())
        return Response(reply.json_bytes(), media_type="application/json")
    chunks = answer.chunks()
    first = await until_disconnect(request.receive, first_of(chunks))
    return event_stream(as_events(_again(first, chunks)), on_close=chunks.aclose)


async def _again(first: Reply | None, rest: AsyncGenerator[Reply, None]) -> AsyncGenerator[Reply, None]:
    async with aclosing(rest):
        if first is not None:
            yield first
        async for reply in rest:
            yield reply


def _model(context: ServerContext) -> Model:
    info = context.frontend.info
    return Model(
        id=info.model_name,
        object="model",
        created=context.started,
        owned_by="torpor",
        root=info.model_id,
        max_model_len=info.max_model_len,
    )
