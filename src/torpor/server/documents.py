"""The OpenAPI document's error answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from torpor.server.replies import ErrorReply

WORDS = {
    400: "The request is wrong; the error names the field.",
    401: "The key or token is missing or wrong.",
    403: "Admin routes without a token answer clients on this machine only.",
    404: "No such model.",
    409: "Not in the present state, or refused by a connector, or the sleep was stopped; the engine serves on.",
    413: "The body is too large.",
    500: "An error of ours.",
    503: "The engine sleeps, is full, or is gone. Retry-After says when to try again, where that helps.",
    507: "Not enough memory: bytes needed and bytes free are in the error's details.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {s: {"model": ErrorReply, "description": WORDS[s]} for s in statuses}


def install_openapi(app: FastAPI, version: str) -> None:
    """FastAPI declares a 422 for every route that takes anything; here such errors are 400 in OpenAI's shape."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=version, description=app.description, routes=app.routes)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(name, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
