"""Asks every engine, again and again, whether it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from torpor.router.backends import Backend
from torpor.router.config import RouterConfig


async def poll_for_ever(client: httpx.AsyncClient, backends: Sequence[Backend], config: RouterConfig) -> None:
    """Until cancelled. One slow engine does not delay the news of another."""
    await asyncio.gather(*(_poll(client, b, config) for b in backends))


async def _poll(client: httpx.AsyncClient, backend: Backend, config: RouterConfig) -> None:
    while True:
        await probe(client, backend, config.health_timeout_s)
        await asyncio.sleep(config.health_interval_s)


async def probe(client: httpx.AsyncClient, backend: Backend, timeout_s: float) -> None:
    """One look at ``/ready``; an engine without that route (404) is judged by its ``/health``."""
    try:
        answer = await client.get(f"{backend.url}/ready", timeout=timeout_s)
        if answer.status_code == 404:
            answer = await client.get(f"{backend.url}/health", timeout=timeout_s)
    except (httpx.HTTPError, OSError) as error:
        backend.saw_silence(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        return
    if answer.status_code == 200:
        backend.saw_ready()
    elif state_word(answer) == "engine_unresponsive":
        backend.saw_silence("its core does not answer")
    else:
        backend.saw_not_ready(state_word(answer))


def state_word(answer: httpx.Response) -> str:
    """The engine's own word for its state where its error has one."""
    error = error_of(answer.content)
    state = (error.get("details") or {}).get("state") if isinstance(error.get("details"), dict) else None
    return str(state or error.get("code") or f"HTTP {answer.status_code}")[:100]


def error_of(body: bytes) -> dict[str, Any]:
    """The error object of an answer in OpenAI's shape, or {}."""
    import json

    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {}
