"""Exception handlers: every failure leaves in OpenAI's error shape, validation errors as 400 and naming the field."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from torpor.errors import BugError, TorporError
from torpor.web.errors import ApiError, HttpError, error_body, plain_status_error, to_http

log = logging.getLogger("torpor.http")
TYPE_STEP = re.compile(r"^(str|int|float|bool|dict|constrained-\w+)$|[\[(]")  # a step into one type of a union, not a field


def install_error_handlers(app: FastAPI, unsupported: Mapping[str, str] | None = None) -> None:
    """``unsupported``: fields that OpenAI knows and we do not, with what they are for; the refusal of one says so."""
    known = dict(unsupported or {})

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return json_error(validation_error(error.errors(), known))

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(TorporError, _on_error)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_error)


def json_error(error: HttpError) -> JSONResponse:
    return JSONResponse(error.body, error.status, headers=error.headers)


def validation_error(problems: Sequence[Any], unsupported: Mapping[str, str]) -> HttpError:
    """The first problem, as OpenAI words it; the others are counted."""
    first = problems[0]
    kind = first["type"]
    path = [str(p) for p in first["loc"][1:] if not TYPE_STEP.search(str(p))]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return plain_status_error(400, f"the body is not valid JSON: {reason}", "invalid_json")
    param = ".".join(path) or None
    if kind == "extra_forbidden" and len(path) == 1:
        return _extra(path[0], unsupported)
    where = f"{param}: " if param else "the body must be a JSON object sent as application/json: "
    message = f"{where}{first['msg']}{_given(first.get('input'))}{_others(problems)}"
    return HttpError(400, error_body(message, "invalid_request_error", "invalid_value", param), {})


def _given(value: Any) -> str:
    return f" (given: {value!r})" if isinstance(value, (str, int, float)) and len(str(value)) <= 40 else ""


def _others(problems: Sequence[Any]) -> str:
    """How many other fields are wrong too. One that fits none of several types is one problem."""
    fields = {tuple(p["loc"][:2]) for p in problems}
    return f"; {len(fields) - 1} more fields are wrong" if len(fields) > 1 else ""


def _extra(name: str, unsupported: Mapping[str, str]) -> HttpError:
    if name in unsupported:
        return plain_status_error(
            400, f"{name!r} is not supported: torpor has no {unsupported[name]}", "unsupported_parameter", name
        )
    return plain_status_error(400, f"unknown field {name!r}", "unknown_parameter", name)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        found = plain_status_error(404, f"no such route: {request.method} {request.url.path}")
    else:
        found = plain_status_error(error.status_code, str(error.detail))
    return JSONResponse(found.body, found.status, headers=error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, BugError) or not isinstance(error, (TorporError, ApiError)):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return json_error(to_http(error))
