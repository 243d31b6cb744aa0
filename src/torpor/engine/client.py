"""Clients of the engine core: ``InprocEngineClient`` (a thread of this process) and ``AsyncEngineClient`` (a process of its own).

Both are used from the event loop they were started on, and behave alike: the same messages pass, whichever way they go.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from torpor.engine.base import EngineInfo, EngineState, SleepMode, SleepRequest
from torpor.engine.channels import QueueChannel
from torpor.engine.config import EngineConfig
from torpor.engine.loop import CoreFactory, CoreLoop
from torpor.engine.process_handle import CoreProcess
from torpor.engine.protocol import (
    Abort,
    Add,
    Call,
    Fatal,
    Operation,
    Outputs,
    Pause,
    Ping,
    Progress,
    Ready,
    Refused,
    ReleaseKVCache,
    Reply,
    Resume,
    Shutdown,
    Sleep,
    StateChanged,
    Stats,
    ToClient,
    ToCore,
    UpdateWeights,
    WakeUp,
    check_operation,
)
from torpor.engine.pulse import Pulse
from torpor.errors import EngineDeadError, RemoteError, RequestError, TorporError
from torpor.request import EngineOutput, GenerationRequest

ProgressCallback = Callable[[str, float], None]
SHUTDOWN_S = 30.0  # a sleep or wake under way is waited for
HUNG_S = 5.0  # a core that has been silent for so long is not asked to end: it is ended


class _Stream:
    """What one reader has not read yet."""

    __slots__ = ("ended", "items")

    def __init__(self) -> None:
        self.items: asyncio.Queue[EngineOutput | TorporError] = asyncio.Queue()
        self.ended = False  # the last output has arrived, read or not


class EngineClientBase:
    """Everything but the line: what is pending, and who waits for it. All of it belongs to one event loop."""

    def __init__(self, progress: ProgressCallback | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._progress = progress
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._info: EngineInfo | None = None
        self._state = EngineState.STARTING
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = itertools.count(1)
        self._streams: dict[str, _Stream] = {}
        self._leaving: Counter[str] = Counter()  # requests whose reader left before their last output came
        self._death: TorporError | None = None
        self._refusal: str | None = None  # why no request is taken any more
        self._closing = False
        self._pulse = Pulse(self._ping, self._worked_s, self._loop.time)

    # ---- the line, for subclasses --------------------------------------------------------------------------------------------

    def _send(self, message: ToCore) -> None:
        raise NotImplementedError

    def _post(self, message: ToClient) -> None:
        """Any thread: hand a message to the event loop."""
        self._in_loop(self._on_message, message)

    def _in_loop(self, fn: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:  # the event loop is closed: nobody is left to tell
            return

    async def _wait_ready(self, timeout_s: float | None) -> None:
        try:
            self._info = await asyncio.wait_for(self._ready, timeout_s)
        except asyncio.TimeoutError:
            raise EngineDeadError(f"the engine core was not ready after {timeout_s:g} s") from None

    def _on_message(self, message: ToClient) -> None:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    self._to_stream(output.request_id, output)
            case Refused(request_id=request_id, error=error):
                self._to_stream(request_id, RemoteError.decode(error))
            case Reply(id=call, result=result, error=error):
                self._on_reply(call, result, error)
            case StateChanged(state=state):
                self._state = EngineState(state)
            case Progress(phase=phase, fraction=fraction):
                if self._progress is not None:
                    self._progress(phase, fraction)
            case Ready(info=info):
                if not self._ready.done():
                    self._ready.set_result(msgspec.convert(info, EngineInfo))
            case Fatal(error=error):
                self._on_death(RemoteError.decode(error))

    def _to_stream(self, request_id: str, item: EngineOutput | TorporError) -> None:
        last = isinstance(item, TorporError) or item.finish_reason is not None
        if self._leaving[request_id]:
            # Every request has exactly one last output. Until it came, what arrives is not for a new request of the same id.
            self._leaving[request_id] -= last
            if not self._leaving[request_id]:
                del self._leaving[request_id]
            return
        del self._leaving[request_id]
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.ended |= last
            stream.items.put_nowait(item)

    def _on_reply(self, call: int, result: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        future = self._calls.pop(call, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(RemoteError.decode(error))
        else:
            future.set_result(result or {})

    def _on_death(self, cause: TorporError) -> None:
        """Everything that is open fails with it, and so does every later call."""
        if self._death is not None:
            return
        self._death = cause
        self._state = EngineState.DEAD
        if not self._ready.done():
            self._ready.set_exception(cause)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._dead_error())
        self._calls.clear()
        for stream in self._streams.values():
            stream.items.put_nowait(self._dead_error())

    def _dead_error(self) -> EngineDeadError:
        assert self._death is not None
        if type(self._death) is EngineDeadError:
            return EngineDeadError(self._death.message, **self._death.fields)
        error = EngineDeadError(f"the engine core ended: {self._death}")
        error.__cause__ = self._death
        return error

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._dead_error()

    def _begin(self, operation: Operation) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        check_operation(operation)
        call = next(self._call_ids)
        self._send(Call(id=call, operation=operation))
        future = self._calls[call] = self._loop.create_future()  # the reply is a later turn's, and what is not sent has none
        return call, future

    async def _call(self, operation: Operation) -> dict[str, Any]:
        self._check_alive()
        call, future = self._begin(operation)
        try:
            return await future
        finally:
            self._calls.pop(call, None)

    def _ping(self) -> None:
        def answered(future: asyncio.Future[dict[str, Any]]) -> None:
            if future.exception() is None:
                self._pulse.answered()

        self._begin(Ping())[1].add_done_callback(answered)

    def _worked_s(self) -> float | None:
        """Processor time that the core has used; None when it cannot be told from ours."""
        return None

    # ---- EngineClient --------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine core never became ready")
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        """See ``EngineClient.generate``. Outputs that are not read wait here, without holding up anybody else."""
        self._check_alive()
        if self._refusal is not None:
            raise EngineDeadError(self._refusal)
        request_id = request.request_id
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        stream = self._streams[request_id] = _Stream()
        added = False
        try:
            self._send(Add(request=request))
            running = added = True
            while running:
                item = await stream.items.get()
                if isinstance(item, TorporError):
                    raise item
                running = item.finish_reason is None
                yield item
        finally:
            del self._streams[request_id]
            if added and not stream.ended and self._death is None:
                self._leaving[request_id] += 1
                self._send(Abort(request_ids=[request_id]))

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check_alive()
        self._send(Abort(request_ids=list(request_ids)))

    def end_requests(self, why: str) -> None:
        """See ``EngineClient.end_requests``. What a request's reader has not read yet comes before the error."""
        self._refusal = why
        for stream in self._streams.values():
            stream.items.put_nowait(EngineDeadError(why))

    async def sleep(self, request: SleepRequest) -> dict[str, Any]:
        return await self._call(Sleep(request=request))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        return await self._call(WakeUp(tags=None if tags is None else list(tags)))

    async def pause(self, mode: SleepMode = "keep") -> dict[str, Any]:
        return await self._call(Pause(mode=mode))

    async def resume(self) -> dict[str, Any]:
        return await self._call(Resume())

    async def release_kv_cache_memory(self) -> dict[str, Any]:
        return await self._call(ReleaseKVCache())

    async def update_weights(self, model: str) -> dict[str, Any]:
        self._check_alive()
        future = self._begin(UpdateWeights(model=model))[1]
        future.add_done_callback(self._on_update)
        return await asyncio.shield(future)  # the core goes on with it, whoever stops waiting

    def _on_update(self, update: asyncio.Future[dict[str, Any]]) -> None:
        if update.exception() is None:
            self._info = dataclasses.replace(self.info, model_id=update.result()["model_id"])

    async def stats(self) -> dict[str, Any]:
        return await self._call(Stats())

    async def check_health(self) -> None:
        await self._call(Ping())

    def silent_s(self) -> float:
        return 0.0 if self._death is not None else self._pulse.silent_s()

    async def shutdown(self) -> None:
        """Ends the core and waits for it. Requests and calls that are open raise EngineDeadError. Idempotent; never raises."""
        if self._closing:
            return
        self._closing = True
        hung = self.silent_s() > HUNG_S
        if self._death is None and self._info is not None and not hung:  # a core that loads hears nothing
            with suppress(TorporError, asyncio.TimeoutError):
                await asyncio.wait_for(self._call(Shutdown()), SHUTDOWN_S)
        why = "did not answer and computed nothing: it was ended" if hung else "was shut down"
        self._on_death(EngineDeadError(f"the engine {why}"))
        if not self._ready.cancelled():
            self._ready.exception()
        await self._close_line(kill=hung or self._info is None)

    async def _close_line(self, *, kill: bool) -> None:
        raise NotImplementedError


_Client = TypeVar("_Client", bound=EngineClientBase)


async def _started(client: _Client, timeout_s: float | None) -> _Client:
    try:
        await client._wait_ready(timeout_s)
    except BaseException:
        await client.shutdown()
        raise
    return client


class InprocEngineClient(EngineClientBase):
    """The core on a thread of this process: for library use and tests. A native crash takes this process with it."""

    def __init__(self, factory: CoreFactory, progress: ProgressCallback | None = None) -> None:
        super().__init__(progress)
        self._channel = QueueChannel(self._post)
        self._core = CoreLoop(factory, self._channel)
        self._thread = threading.Thread(target=self._run, name="torpor-core", daemon=True)
        self._thread.start()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        progress: ProgressCallback | None = None,
        timeout_s: float | None = None,
        factory: CoreFactory | None = None,
    ) -> InprocEngineClient:
        """Waits until the engine serves. Raises what kept it from that (ConfigurationError, DeviceMemoryError, ...).

        ``factory`` makes the core instead of ``start_core(config)``.
        """
        return await _started(cls(factory or core_factory(config), progress), timeout_s)

    def _run(self) -> None:
        error = self._core.run()
        if error is None:
            self._in_loop(self._on_death, EngineDeadError("the engine was shut down"))

    def _send(self, message: ToCore) -> None:
        self._channel.put(message)

    async def _close_line(self, *, kill: bool) -> None:
        self._channel.close()
        await asyncio.to_thread(self._thread.join, SHUTDOWN_S)


class AsyncEngineClient(EngineClientBase):
    """The core in a process of its own: what a server uses. Its death is noticed at once and named."""

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        super().__init__(progress)
        self._process = CoreProcess(config, on_message=self._post, on_death=lambda error: self._in_loop(self._on_death, error))

    @classmethod
    async def start(
        cls, config: EngineConfig, *, progress: ProgressCallback | None = None, timeout_s: float | None = None
    ) -> AsyncEngineClient:
        """Waits until the engine serves; meanwhile ``progress(phase, fraction)`` is called on the event loop. Raises what kept
        the core from serving, or EngineDeadError with the exit status."""
        return await _started(cls(config, progress), timeout_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _send(self, message: ToCore) -> None:
        self._process.send(message)

    def _worked_s(self) -> float | None:
        return self._process.worked_s()

    async def _close_line(self, *, kill: bool) -> None:
        await asyncio.to_thread(self._process.close, kill=kill)


def core_factory(config: EngineConfig) -> CoreFactory:
    """``start_core`` for this configuration. Imported late: it brings in torch."""

    def make(**callbacks: Any) -> Any:
        from torpor.engine.startup import start_core

        return start_core(config, **callbacks)

    return make
