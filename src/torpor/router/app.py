"""The router as an application: ``/v1`` to the engines, and its own health, readiness, figures."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from torpor import __version__
from torpor.errors import CapacityError, PeerError, TorporError
from torpor.router.backends import Backend, BackendStats, Clock, Group
from torpor.router.bodies import parse_body
from torpor.router.config import RouterConfig
from torpor.router.health import poll_for_ever
from torpor.router.metrics import RouterMetrics
from torpor.router.proxy import CHAT_PATH, Proxy
from torpor.router.upstream import no_connection, words
from torpor.web.errors import UNAVAILABLE, error_body, to_http
from torpor.web.handlers import install_error_handlers, json_error
from torpor.web.middleware import BodyLimit, RequestId
from torpor.web.streams import stop, until_disconnect

COMPLETION_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStats:
    policy: str
    prefill: tuple[BackendStats, ...]
    decode: tuple[BackendStats, ...]


class Router:
    """Engines, their groups, and the client that talks to them. ``serving`` polls their health while it is entered."""

    def __init__(
        self, config: RouterConfig, transport: httpx.AsyncBaseTransport | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.config = config
        self.prefill = Group([Backend(u, "prefill", config, clock) for u in config.prefill], config.policy)
        self.decode = Group([Backend(u, "decode", config, clock) for u in config.decode], config.policy)
        self.backends = (*self.prefill.backends, *self.decode.backends)
        self.metrics = RouterMetrics(self.backends)
        self.client = httpx.AsyncClient(
            # Reads are bounded by the router's own deadlines, which cover whole answers.
            timeout=httpx.Timeout(None, connect=config.connect_timeout_s, pool=config.connect_timeout_s),
            limits=httpx.Limits(max_connections=config.max_connections, max_keepalive_connections=config.max_connections),
            transport=transport,
            trust_env=False,
        )
        # Probes have connections of their own, one for each engine: behind requests that take all of the client's they would
        # time out, engines that serve would count as silent, and these requests would be given up.
        self.probes = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), transport=transport, trust_env=False)
        self.proxy = Proxy(self.client, self.prefill, self.decode, config, self.metrics)

    @asynccontextmanager
    async def serving(self, app: FastAPI) -> AsyncIterator[None]:
        polling = asyncio.ensure_future(poll_for_ever(self.probes, self.backends, self.config))
        try:
            yield
        finally:
            await stop(polling)
            await self.client.aclose()
            await self.probes.aclose()

    def stats(self) -> RouterStats:
        return RouterStats(
            policy=self.config.policy,
            prefill=tuple(b.stats() for b in self.prefill.backends),
            decode=tuple(b.stats() for b in self.decode.backends),
        )


def create_app(config: RouterConfig, transport: httpx.AsyncBaseTransport | None = None, clock: Clock = time.monotonic) -> FastAPI:
    """``transport`` stands in for the network in tests, ``clock`` for the time of backoffs."""
    router = Router(config, transport, clock)
    app = FastAPI(title="torpor router", version=__version__, lifespan=router.serving, redirect_slashes=False)
    app.state.router = router
    _add_generation(app, router)
    _add_models(app, router)
    _add_probes(app, router)
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(RequestId)
    return app


def _add_generation(app: FastAPI, router: Router) -> None:
    async def generate(request: Request) -> Response:
        started = time.monotonic()
        path = request.url.path
        response = await _answer(router, request, path)
        router.metrics.answered(path, response.status_code, time.monotonic() - started)
        return response

    for path in (COMPLETION_PATH, CHAT_PATH):
        app.add_api_route(path, generate, methods=["POST"], response_class=Response, summary="As the engines answer it")


async def _answer(router: Router, request: Request, path: str) -> Response:
    raw = await request.body()
    try:
        body = parse_body(raw)
        return await until_disconnect(request.receive, router.proxy.handle(path, body, forwarded_headers(request)))
    except TorporError as error:
        return json_error(to_http(error))


def forwarded_headers(request: Request) -> Mapping[bytes, bytes]:
    """The client's credentials, whatever bytes they are, and the request's id; no compression, so that bytes pass as they are."""
    headers = {
        b"content-type": b"application/json",
        b"accept-encoding": b"identity",
        b"x-request-id": request.scope["request_id"].encode(),
    }
    if "authorization" in request.headers:
        headers[b"authorization"] = request.headers["authorization"].encode("latin-1")
    return headers


def _add_models(app: FastAPI, router: Router) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """From the first decode engine that answers."""
        failures = []
        for backend in router.decode.candidates():
            try:
                answer = await router.client.get(
                    f"{backend.url}/v1/models", headers=dict(forwarded_headers(request)), timeout=router.config.health_timeout_s
                )
            except httpx.PoolTimeout as error:
                raise no_connection() from error
            except httpx.HTTPError as error:
                failures.append(str(PeerError(f"{backend.url}: {words(error)}")))
                continue
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        raise CapacityError(f"no decode engine answered: {'; '.join(failures)}")


def _add_probes(app: FastAPI, router: Router) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while the router lives."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """200 when a decode engine serves; the prefill engines may all sleep."""
        if router.decode.any_ready:
            return JSONResponse({"status": "ready"})
        states = {b.url: b.state.value for b in router.decode.backends}
        return JSONResponse(
            error_body("no decode engine is ready", UNAVAILABLE, "not_ready", details=states), 503, {"Retry-After": "1"}
        )

    @app.get("/stats")
    async def stats() -> dict[str, object]:
        return dataclasses.asdict(router.stats())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(router.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}
