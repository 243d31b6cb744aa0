"""Runs the prompts of one request and folds their deltas: one stream of (choice, delta), one Choice per answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torpor.engine.frontend import Frontend, TextDelta
from torpor.request import FinishReason, TokenLogprobs
from torpor.server.metrics import RequestMeter
from torpor.server.replies import Finish, Usage
from torpor.server.sampling import Job
from torpor.web.streams import stop

T = TypeVar("T")


async def run_jobs(frontend: Frontend, jobs: Sequence[Job], meter: RequestMeter) -> AsyncGenerator[TextDelta, None]:
    """Deltas with the choice's index in the whole answer. Closing it aborts every prompt; an error of one aborts the others."""
    with meter:
        streams = [_run_job(frontend, job) for job in jobs]
        async with aclosing(streams[0] if len(streams) == 1 else merge(streams)) as deltas:
            async for delta in deltas:
                meter.observe(delta)
                yield delta


async def _run_job(frontend: Frontend, job: Job) -> AsyncGenerator[TextDelta, None]:
    source = frontend.generate(
        job.request_id,
        job.prompt_token_ids,
        job.sampling,
        n=job.n,
        kv_transfer_params=job.kv_transfer_params,
        param=job.param,
    )
    async with aclosing(source) as deltas:
        async for delta in deltas:
            yield replace(delta, index=job.first_index + delta.index)


@dataclass(frozen=True, slots=True)
class _Ended:
    error: Exception | None


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all as they come. The first failure closes the others and is raised; closing closes all."""
    queue: asyncio.Queue[T | _Ended] = asyncio.Queue(maxsize=2 * len(streams))

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            await queue.put(_Ended(error))
        else:
            await queue.put(_Ended(None))

    pumps = [asyncio.ensure_future(pump(s)) for s in streams]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in pumps:
            task.cancel()
        for task in pumps:
            await stop(task)


@dataclass
class Choice:
    """One answer, folded from its deltas."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


@dataclass
class Tally:
    """Usage and hand-off of a whole answer. A prompt counts once, however many choices it has."""

    choices_per_prompt: int
    kv_transfer_params: dict[str, object] | None = None
    _prompt: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _generated: int = 0

    def add(self, delta: TextDelta) -> None:
        job = delta.index // self.choices_per_prompt
        self._prompt[job] = max(self._prompt.get(job, 0), delta.num_prompt_tokens)
        self._cached[job] = max(self._cached.get(job, 0), delta.num_cached_tokens)
        self._generated += len(delta.token_ids)
        if delta.kv_transfer_params is not None:
            self.kv_transfer_params = delta.kv_transfer_params

    @property
    def usage(self) -> Usage:
        return Usage.of(sum(self._prompt.values()), self._generated, sum(self._cached.values()))


def finish_word(reason: FinishReason | None) -> Finish | None:
    """OpenAI's word; ``abort`` is vLLM's, for what an operator ended. An error never gets here: the front end raises it."""
    words: dict[FinishReason, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
    return words[reason] if reason is not None else None


def now() -> int:
    return int(time.time())
