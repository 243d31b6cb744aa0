"""The application: routes, doors, error shapes, limits."""

from __future__ import annotations

from fastapi import FastAPI

from torpor import __version__
from torpor.engine.frontend import Frontend
from torpor.server.admin import admin_routes
from torpor.server.config import ServerConfig
from torpor.server.context import ServerContext
from torpor.server.documents import install_openapi
from torpor.server.health_routes import health_routes
from torpor.server.metrics import Metrics
from torpor.server.openai_routes import openai_routes
from torpor.server.wire import UNSUPPORTED
from torpor.web.handlers import install_error_handlers
from torpor.web.middleware import BodyLimit, RequestId

DESCRIPTION = "OpenAI's API over an engine whose device memory can sleep."


def create_app(frontend: Frontend, config: ServerConfig | None = None) -> FastAPI:
    """The front end must have been started and is not shut down here: that is its owner's (see ``run_server``)."""
    config = config or ServerConfig()
    context = ServerContext(frontend, config, Metrics(frontend.info.model_name))
    app = FastAPI(title="torpor", version=__version__, description=DESCRIPTION, redirect_slashes=False)
    app.state.context = context
    for routes in (openai_routes(context), admin_routes(context), health_routes(context)):
        app.include_router(routes)
    install_error_handlers(app, UNSUPPORTED)
    install_openapi(app, __version__)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(RequestId)
    return app
