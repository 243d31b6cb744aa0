"""Routes for probes, scrapers and people: open to all, answered also while the engine sleeps."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from torpor import __version__
from torpor.engine.base import EngineState
from torpor.errors import TorporError
from torpor.server.context import ServerContext
from torpor.server.documents import errors
from torpor.server.replies import Status, Version
from torpor.web.errors import UNAVAILABLE, ApiError, error_body, retry_after
from torpor.web.errors import to_http as http_error


def health_routes(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.get("/health", response_model=Status, responses=errors(503))
    async def health() -> Response:
        """200 while the engine lives, asleep or not; 503 when it is gone or does not answer."""
        return await _health(context)

    @routes.get("/ready", response_model=Status, responses=errors(503))
    async def ready() -> Response:
        """200 only when requests are served now; else 503, and the state is the error's code."""
        return _ready(context)

    @routes.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}, response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        stats = await context.stats_or_none()
        state = context.state if stats is None else EngineState(stats["state"])  # of the same moment as the figures
        return Response(context.metrics.render(state, stats), headers={"content-type": CONTENT_TYPE_LATEST})

    @routes.get("/version", response_model=Version)
    async def version() -> Version:
        return Version(version=__version__)

    return routes


async def _health(context: ServerContext) -> Response:
    try:
        context.check_responsive()
        if context.state is EngineState.DEAD:
            await context.client.check_health()  # says why
    except (ApiError, TorporError) as error:
        found = http_error(error)
        return JSONResponse(found.body, 503, headers=found.headers)
    return JSONResponse({"status": "ok", "state": context.state.value})


def _ready(context: ServerContext) -> Response:
    state = context.state
    try:
        context.check_responsive()
    except ApiError as error:
        found = http_error(error)
        return JSONResponse(found.body, found.status, headers=found.headers)
    if state is EngineState.AWAKE:
        return JSONResponse({"status": "ready", "state": state.value})
    body = error_body(f"the engine is {state.value}", UNAVAILABLE, state.value, details={"state": state.value})
    headers = {} if state is EngineState.DEAD else {"Retry-After": retry_after_of_probe()}
    return JSONResponse(body, 503, headers=headers)


def retry_after_of_probe() -> str:
    return retry_after(TorporError(""))
