"""``LLM``: an engine for scripts, without an event loop of one's own.

>>> with LLM("builtin:smollm2-135m", enable_sleep_mode=True) as llm:
...     answer = llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
...     report = llm.sleep(level=1)
...     wake = llm.wake_up()
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from torpor.connectors.config import ConnectorConfig
from torpor.engine.base import EngineInfo, EngineState, SleepMode, SleepRequest
from torpor.engine.client import AsyncEngineClient, InprocEngineClient
from torpor.engine.config import EngineConfig
from torpor.engine.frontend import Frontend
from torpor.engine.llm_inputs import Messages, Prompt, as_conversations, as_prompts, one_each
from torpor.engine.output_processor import TextDelta
from torpor.engine.settings import config_from_settings
from torpor.errors import EngineDeadError
from torpor.request import FinishReason, SamplingParams, TokenLogprobs

T = TypeVar("T")
ENDS_ITSELF_S, PUT_AWAY_S = 1.0, 60.0
LISTENS_S = 0.5


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # n of them
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


class LLM:
    """Blocks in its constructor until the engine serves. Usable from several threads. ``close`` it, or use it in a ``with``."""

    def __init__(
        self,
        model: str,
        *,
        enable_sleep_mode: bool = False,
        connector: ConnectorConfig | None = None,
        in_process: bool = True,
        progress: Callable[[str, float], None] | None = None,
        **settings: Any,
    ) -> None:
        """``settings``: any field of the configuration's sections by its name (``num_blocks``, ``dtype``, ``max_model_len``).
        With ``in_process=False`` the core has a process of its own. Raises what kept the engine from starting."""
        config = config_from_settings(model, connector=connector, enable_sleep_mode=enable_sleep_mode, **settings)
        self._ids = itertools.count()
        self._at_once = config.scheduler.max_waiting
        self._open = False
        self._loop = _LoopThread()
        try:
            self._client = self._loop.run(_start_client(config, in_process, progress))
            try:
                self._frontend = Frontend.for_client(self._client, trust_remote_code=config.model.trust_remote_code)
            except BaseException:
                self._loop.run(self._client.shutdown())
                raise
        except BaseException:
            self._loop.close()
            raise
        self._open = True

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def state(self) -> EngineState:
        return self._client.state

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One result per prompt, in their order; a prompt is text or token ids. One SamplingParams for all, or one each. The
        first error ends all of them and is raised; what is no prompt is a RequestError before any of them begins."""
        asked = [(p, self._frontend.encode(p)) if isinstance(p, str) else (None, p) for p in as_prompts(prompts)]
        return self._generate(asked, sampling, n, kv_transfer_params)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """``generate`` for one conversation, or several, through the model's chat template."""
        asked = [(None, self._frontend.encode_chat(messages, template_kwargs)) for messages in as_conversations(conversations)]
        return self._generate(asked, sampling, n, None, "messages")

    def sleep(
        self,
        level: int = 1,
        *,
        mode: SleepMode = "wait",
        deadline_s: float | None = None,
        policies: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Gives device memory back; returns the report (``torpor.engine.reports``). SleepAborted: it did not happen, the
        engine is awake."""
        return self._run(self._client.sleep(SleepRequest(level=level, mode=mode, deadline_s=deadline_s, policies=policies)))

    def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """All of it, or some pools: the engine serves again once every pool is back."""
        return self._run(self._client.wake_up(tags))

    def pause(self, mode: SleepMode = "keep") -> dict[str, Any]:
        return self._run(self._client.pause(mode))

    def resume(self) -> dict[str, Any]:
        return self._run(self._client.resume())

    def release_kv_cache_memory(self) -> dict[str, Any]:
        return self._run(self._client.release_kv_cache_memory())

    def update_weights(self, model: str) -> dict[str, Any]:
        """Between ``sleep(level=2)`` and ``wake_up()``: the wake loads this checkpoint, of the same configuration, instead."""
        return self._run(self._client.update_weights(model))

    def stats(self) -> dict[str, Any]:
        return self._run(self._client.stats())

    def close(self) -> None:
        """Ends the engine and gives everything back. Idempotent."""
        if self._open:
            self._open = False
            self._loop.run(self._client.shutdown())
            self._loop.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            warnings.warn("an LLM was not closed: its memory stays taken until the process ends", ResourceWarning, stacklevel=2)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _generate(
        self,
        asked: Sequence[tuple[str | None, list[int]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
        kv_transfer_params: dict[str, Any] | None,
        param: str = "prompt",
    ) -> list[RequestOutput]:
        params = one_each(sampling, len(asked))
        for (_, token_ids), sampling_params in zip(asked, params, strict=True):
            self._frontend.check(token_ids, sampling_params, n, param=param)
        requests = [
            RequestOutput(
                request_id=f"llm-{next(self._ids)}",
                prompt=text,
                prompt_token_ids=token_ids,
                outputs=[CompletionOutput(index=i) for i in range(n)],
            )
            for text, token_ids in asked
        ]
        self._run(self._gather(requests, params, n, kv_transfer_params))
        return requests

    async def _gather(
        self, requests: list[RequestOutput], params: list[SamplingParams], n: int, transfer: dict[str, Any] | None
    ) -> None:
        gate = asyncio.Semaphore(max(1, self._at_once // n))  # the engine refuses more, and one refusal would end all of them
        tasks = [
            asyncio.create_task(self._collect(request, sampling, n, transfer, gate))
            for request, sampling in zip(requests, params, strict=True)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(
        self, request: RequestOutput, sampling: SamplingParams, n: int, transfer: dict[str, Any] | None, gate: asyncio.Semaphore
    ) -> None:
        stream = self._frontend.generate(request.request_id, request.prompt_token_ids, sampling, n=n, kv_transfer_params=transfer)
        async with gate, aclosing(stream) as deltas:
            async for delta in deltas:
                _add(request, delta)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)


def _add(request: RequestOutput, delta: TextDelta) -> None:
    output = request.outputs[delta.index]
    output.text += delta.text
    output.token_ids += delta.token_ids
    if delta.logprobs is not None:
        output.logprobs = [*(output.logprobs or []), *delta.logprobs]
    output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
    request.num_cached_tokens = max(request.num_cached_tokens, delta.num_cached_tokens)
    request.kv_transfer_params = delta.kv_transfer_params or request.kv_transfer_params


async def _start_client(
    config: EngineConfig, in_process: bool, progress: Callable[[str, float], None] | None
) -> InprocEngineClient | AsyncEngineClient:
    if in_process:
        return await InprocEngineClient.start(config, progress=progress)
    return await AsyncEngineClient.start(config, progress=progress)


class _LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="torpor-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Blocks until ``work`` is done. An interrupt cancels it."""
        if self._loop.is_closed():
            work.close()
            raise EngineDeadError("the engine was shut down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return _outcome(future)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self._loop.is_closed():
            return
        for work in (_put_away, self._loop.shutdown_asyncgens, self._loop.shutdown_default_executor):
            _outcome(asyncio.run_coroutine_threadsafe(work(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _outcome(future: Future[T]) -> T:
    """Its result, once it has one. A signal that comes just before CPython begins to wait does not end that wait: without a look
    now and then a Ctrl-C would be heard when the future is done."""
    while not wait([future], LISTENS_S).done:
        pass
    return future.result()


async def _put_away() -> None:
    """What was cancelled (a start, by an interrupt) is giving things back: a loop that stops under it leaves a core behind. What
    was not cancelled (the interrupt came before anybody could) is, unless it ends by itself."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    late = (await asyncio.wait(others, timeout=ENDS_ITSELF_S))[1] if others else set()
    for task in late:
        if hasattr(task, "cancelling") and not task.cancelling():  # before Python 3.11 nobody can tell, and twice is too often
            task.cancel()
    if late:
        await asyncio.wait(late, timeout=PUT_AWAY_S)
