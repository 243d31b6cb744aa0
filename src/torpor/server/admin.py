"""Admin routes: sleep, wake, pause, release, new weights, stats. Names and parameters as in vLLM, where it has them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from torpor.engine.base import EngineState, SleepMode, SleepRequest
from torpor.errors import ModelError, RequestError
from torpor.memory.types import Policy
from torpor.server.auth import admin_door
from torpor.server.context import ServerContext
from torpor.server.documents import errors
from torpor.server.replies import Sleeping
from torpor.server.wire import check_few

Level = Literal[0, 1, 2]
NOT_AWAKE = (EngineState.SLEEPING, EngineState.ASLEEP, EngineState.WAKING)


class QueryModel(BaseModel):
    """A misspelt parameter is an error, not a default."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


class NoQuery(QueryModel):
    pass


class SleepQuery(QueryModel):
    level: int | None = Field(
        None, ge=0, le=2, description="0: pause; 1: weights to host, KV dropped; 2: weights dropped too. Default 1"
    )
    mode: SleepMode | None = Field(None, description="what happens to running requests. Default wait")
    deadline_s: float | None = Field(
        None, gt=0, le=86400, description="running requests that have not ended by then undo the sleep"
    )


class SleepBody(BaseModel):
    """The same as JSON, and ``policies`` (tag to policy) instead of a level."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    level: Level | None = None
    mode: SleepMode | None = None
    deadline_s: float | None = Field(None, gt=0, le=86400)
    policies: Annotated[dict[str, Policy], BeforeValidator(check_few)] | None = Field(None, min_length=1)


class UpdateBody(BaseModel):
    """``model``: a folder or a .gguf file, as at start-up, on the server's machine."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    model: str = Field(min_length=1, max_length=4096)


class WakeQuery(QueryModel):
    tags: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="repeatable, or separated by commas; none: all"
    )


class PauseQuery(QueryModel):
    mode: SleepMode = Field("keep", description="what happens to running requests")


def admin_routes(context: ServerContext) -> APIRouter:
    routes = APIRouter(tags=["admin"], dependencies=[Depends(admin_door(context.config))])
    failures = errors(400, 401, 403, 409, 413, 500, 503, 507)
    alive = [Depends(context.require_responsive)]

    @routes.post("/sleep", dependencies=alive, responses=failures)
    async def sleep(query: Annotated[SleepQuery, Query()], body: SleepBody | None = None) -> dict[str, Any]:
        """Gives device memory back. Answers when done, with the report: per tag, bytes unmapped, given back, and held by whom.
        ``noop`` in this and the other reports: the call has changed nothing, neither memory nor requests nor the state."""
        request = sleep_request(query, body)
        with context.metrics.operation("sleep"):
            return await context.client.sleep(request)

    @routes.post("/wake_up", dependencies=alive, responses=failures)
    async def wake_up(query: Annotated[WakeQuery, Query()]) -> dict[str, Any]:
        """Maps memory again and restores it. With ``tags``, only those: the engine serves once every tag is back. It also ends
        a pause, and cancels a sleep or a pause that is still draining: ``noop`` is false then, and ``reason`` says so."""
        tags = split_tags(query.tags)
        with context.metrics.operation("wake_up"):
            return await context.client.wake_up(tags or None)

    @routes.get("/is_sleeping", response_model=Sleeping, responses=errors(400, 401, 403))
    async def is_sleeping(query: Annotated[NoQuery, Query()]) -> Sleeping:
        state = context.state
        return Sleeping(is_sleeping=state in NOT_AWAKE, state=state.value)

    @routes.post("/release_kv_cache_memory", dependencies=alive, responses=failures)
    async def release_kv_cache_memory(query: Annotated[NoQuery, Query()]) -> dict[str, Any]:
        """Drops the KV cache and gives its memory back; weights stay."""
        with context.metrics.operation("release_kv_cache_memory"):
            return await context.client.release_kv_cache_memory()

    @routes.post("/update_weights", dependencies=alive, responses=failures)
    async def update_weights(query: Annotated[NoQuery, Query()], body: UpdateBody) -> dict[str, Any]:
        """While asleep: names the checkpoint that the next ``/wake_up`` loads instead of the present weights. Of the same
        configuration; KV of the old weights is served to nobody any more. Sleep with level 2 before, so that no copy is kept."""
        with context.metrics.operation("update_weights"):
            try:
                return await context.client.update_weights(body.model)
            except ModelError as error:  # the caller's file, not the server's
                raise RequestError(str(error), param="model") from error

    @routes.post("/pause", dependencies=alive, responses=failures)
    async def pause(query: Annotated[PauseQuery, Query()]) -> dict[str, Any]:
        """Stops serving without giving memory back."""
        with context.metrics.operation("pause"):
            return await context.client.pause(query.mode)

    @routes.post("/resume", dependencies=alive, responses=failures)
    async def resume(query: Annotated[NoQuery, Query()]) -> dict[str, Any]:
        """Ends a pause, also one that is still draining; ``noop`` when there is none."""
        with context.metrics.operation("resume"):
            return await context.client.resume()

    @routes.get("/memory", responses=errors(400, 401, 403, 500, 503))
    async def memory(query: Annotated[NoQuery, Query()]) -> dict[str, Any]:
        """The engine's stats: pools, scheduler, cache, connector. ``stale`` is set when the engine is too busy to answer anew."""
        return await context.fresh_stats()

    return routes


def sleep_request(query: SleepQuery, body: SleepBody | None) -> SleepRequest:
    """What was given, in the query or in the body; RequestError for both at once."""
    given: dict[str, Any] = query.model_dump(exclude_none=True)
    for name, value in (body.model_dump(exclude_none=True) if body else {}).items():
        if name in given:
            raise RequestError(f"{name} was given in the query and in the body", param=name)
        given[name] = value
    if "policies" in given and "level" in given:
        raise RequestError("give a level or policies, not both", param="policies")
    return SleepRequest(**given)


def split_tags(values: list[str]) -> list[str]:
    """RequestError for ``tags=`` with nothing in it: it would otherwise wake everything."""
    tags = [t.strip() for value in values for t in value.split(",")]
    if values and not all(tags):
        raise RequestError("tags must be names of tags; leave it out to wake all", param="tags")
    return tags
