"""The engine's loop: messages in, a step, outputs out. The same for a thread of this process and for a process of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from torpor.engine.base import EngineState
from torpor.engine.core import EngineCore
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
)
from torpor.engine.reports import plain
from torpor.engine.tickets import Ticket
from torpor.errors import EngineDeadError, RemoteError, TorporError

log = logging.getLogger(__name__)


class Channel(Protocol):
    """A core's side of the line to its client. ``receive`` and ``send`` belong to the loop thread; ``notify`` to any."""

    def receive(self, timeout_s: float | None) -> list[ToCore]:
        """What has come; waits at most ``timeout_s`` for the first (None: for ever) or until ``notify``. May be empty."""
        ...

    def send(self, message: ToClient) -> None:
        """Never blocks: a slow client is the client's trouble."""
        ...

    def notify(self) -> None: ...

    @property
    def closed(self) -> bool:
        """The client is gone, or somebody asked this process to end."""
        ...


class CoreFactory(Protocol):
    """Makes the core; ``torpor.engine.startup.start_core`` with a configuration bound, or a test's own."""

    def __call__(
        self,
        *,
        progress: Callable[[str, float], None],
        on_state: Callable[[EngineState], None],
        on_ready: Callable[[], None],
    ) -> EngineCore: ...


class CoreLoop:
    """``run`` returns when the client said so or is gone, or when the core could not go on; then everything is released."""

    def __init__(self, factory: CoreFactory, channel: Channel) -> None:
        self._factory = factory
        self._channel = channel
        self._shutdown_call: int | None = None
        self._stopping = False
        self.core: EngineCore | None = None  # once it runs; for support and tests, not for other threads' calls

    def run(self) -> BaseException | None:
        """Returns what ended it: None for a shutdown."""
        error = None
        try:
            self.core = self._start()
            self._serve(self.core)
        except Exception as caught:
            error, foreseen = caught, isinstance(caught, TorporError)
            level = logging.DEBUG if foreseen and self.core is None else logging.ERROR  # the client's start raises it, and tells
            log.log(level, "the engine core ends: %s", error, exc_info=not foreseen)
        self._finish(self.core, error)
        return error

    def _start(self) -> EngineCore:
        channel = self._channel
        core = self._factory(
            progress=lambda phase, fraction: channel.send(Progress(phase=phase, fraction=fraction)),
            on_state=lambda state: channel.send(StateChanged(state=state.value)),
            on_ready=channel.notify,
        )
        channel.send(Ready(info=plain(core.info)))
        return core

    def _serve(self, core: EngineCore) -> None:
        while not self._stopping and not self._channel.closed:
            for message in self._channel.receive(core.wait_s()):
                self._handle(core, message)
            outputs = core.step()
            if outputs:
                self._channel.send(Outputs(outputs=outputs))

    def _finish(self, core: EngineCore | None, error: BaseException | None) -> None:
        """The client learns the reason first: giving memory back takes a while."""
        if error is not None:
            self._channel.send(Fatal(error=RemoteError.encode(error)))
        try:
            if core is not None:
                core.shutdown(EngineDeadError(f"the engine core ended: {error}") if error is not None else None)
        except Exception:
            log.exception("the engine core did not shut down cleanly")
        if self._shutdown_call is not None:
            self._channel.send(Reply(id=self._shutdown_call, result={}))

    def _handle(self, core: EngineCore, message: ToCore) -> None:
        match message:
            case Add(request=request):
                try:
                    core.add(request)
                except TorporError as error:
                    self._channel.send(Refused(request_id=request.request_id, error=RemoteError.encode(error)))
            case Abort(request_ids=request_ids):
                core.abort(request_ids)
            case Call(id=call, operation=operation):
                self._call(core, call, operation)

    def _call(self, core: EngineCore, call: int, operation: Operation) -> None:
        match operation:
            case Stats():
                self._channel.send(Reply(id=call, result=plain(core.stats())))
            case Ping():
                self._channel.send(Reply(id=call, result={}))
            case Shutdown():
                self._shutdown_call, self._stopping = call, True
            case _:
                _ticket(core, operation).add_done_callback(lambda ticket: self._reply(call, ticket))

    def _reply(self, call: int, ticket: Ticket) -> None:
        error = ticket.exception()
        if error is not None:
            self._channel.send(Reply(id=call, error=RemoteError.encode(error)))
        else:
            self._channel.send(Reply(id=call, result=ticket.result()))


def _ticket(core: EngineCore, operation: Sleep | WakeUp | Pause | Resume | ReleaseKVCache | UpdateWeights) -> Ticket:
    calls: dict[type[Any], Callable[[Any], Ticket]] = {
        Sleep: lambda op: core.sleep(op.request),
        WakeUp: lambda op: core.wake_up(op.tags),
        Pause: lambda op: core.pause(op.mode),
        Resume: lambda op: core.resume(),
        ReleaseKVCache: lambda op: core.release_kv_cache_memory(),
        UpdateWeights: lambda op: core.update_weights(op.model),
    }
    return calls[type(operation)](operation)
