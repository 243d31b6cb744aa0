"""A real client and a real core loop without their threads: messages, steps and readers move when a test says so."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from checked_worker import FIRST

from torpor.engine.channels import QueueChannel
from torpor.engine.client import EngineClientBase
from torpor.engine.core import EngineCore
from torpor.engine.loop import CoreFactory, CoreLoop
from torpor.engine.protocol import Outputs, ToCore
from torpor.errors import TorporError
from torpor.request import EngineOutput, GenerationRequest

READY_S = 10.0
HOPS = 4  # of the event loop between a message and the reader it is for


class SteppedClient(EngineClientBase):
    """Made inside the event loop that it belongs to. Nothing happens between two calls of ``deliver``, ``step`` and ``end``."""

    def __init__(self, factory: CoreFactory) -> None:
        super().__init__(None)
        self._channel = QueueChannel(self._post)
        self._core_loop = CoreLoop(factory, self._channel)
        self.core: EngineCore = self._core_loop._start()

    def _send(self, message: ToCore) -> None:
        self._channel.put(message)

    async def _close_line(self, **how: object) -> None:
        self._channel.close()

    def deliver(self) -> None:
        """What clients have sent reaches the core."""
        for message in self._channel.receive(0):
            self._core_loop._handle(self.core, message)

    def step(self) -> None:
        self.deliver()
        outputs = self.core.step()
        if outputs:
            self._channel.send(Outputs(outputs=outputs))

    def end(self) -> None:
        self._core_loop._finish(self.core, None)


class Stream:
    """A reader of one request: what it was told, and how it ended."""

    def __init__(self, client: SteppedClient, request: GenerationRequest) -> None:
        self.request = request
        self.versions = FIRST
        self.tokens: list[int] = []
        self.end: EngineOutput | None = None
        self.error: TorporError | None = None
        self.left = False
        self.may_abort = False
        self.while_asleep = False
        self._task = asyncio.get_running_loop().create_task(self._read(client))

    async def _read(self, client: SteppedClient) -> None:
        try:
            async with aclosing(client.generate(self.request)) as outputs:
                async for output in outputs:
                    self.tokens += output.new_token_ids
                    self.end = output if output.finish_reason is not None else None
        except TorporError as error:
            self.error = error

    @property
    def open(self) -> bool:
        return not (self._task.done() or self.left)

    def leave(self) -> None:
        """The client disconnects."""
        self.left = True
        self._task.cancel()

    def failure(self) -> BaseException | None:
        """What went wrong in the reader itself."""
        if self._task.done() and not self._task.cancelled():
            return self._task.exception()
        return None


class Events:
    """An event loop that runs a few turns at a time."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def pump(self, hops: int = HOPS) -> None:
        for _ in range(hops):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def client(self, factory: CoreFactory) -> SteppedClient:
        async def make() -> SteppedClient:
            client = SteppedClient(factory)
            await client._wait_ready(READY_S)
            return client

        return self.loop.run_until_complete(make())

    def stream(self, client: SteppedClient, request: GenerationRequest) -> Stream:
        async def make() -> Stream:
            return Stream(client, request)

        stream = self.loop.run_until_complete(make())
        self.pump()
        client.deliver()
        self.pump()
        return stream

    def shutdown(self, client: SteppedClient) -> None:
        task: asyncio.Task[Any] = self.loop.create_task(client.shutdown())
        self.pump()
        client.deliver()
        client.end()
        self.loop.run_until_complete(asyncio.wait_for(task, READY_S))
        self.pump()

    def close(self) -> None:
        self.pump(2 * HOPS)
        self.loop.run_until_complete(_cancel_the_others())
        self.loop.close()


async def _cancel_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
