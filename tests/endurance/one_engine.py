"""One engine that sleeps and wakes while it is asked: the long run over a single core."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from engine_models import tiny_engine
from footprint import Footprint, measure, observe
from moves import Mover
from runs import Run
from texts import End, ask, make_texts, with_answers

from torpor.engine.base import EngineState
from torpor.engine.client import InprocEngineClient

START_S = 90.0
TEXTS = 14


async def endure(folder: Path, cycles: int, seed: int, say: Callable[[str], None], rounds: int = 0) -> list[Footprint]:
    """The footprints that ``observe`` asks for. Everything random comes from ``seed``."""
    client = await InprocEngineClient.start(tiny_engine(folder, num_blocks=96), timeout_s=START_S)
    try:
        run = OneEngine(client, seed, say)
        await run.prepare()
        figures = await observe(run.run_to, cycles, rounds)
        say(f"one engine, seed {seed}, {figures[-1].cycle} cycles: {dict(sorted(run.counts.items()))}")
        return figures
    finally:
        await client.shutdown()


class OneEngine(Run):
    def __init__(self, client: InprocEngineClient, seed: int, say: Callable[[str], None]) -> None:
        rng = random.Random(seed)
        super().__init__(seed, say)
        self._client = client
        self._rng = rng
        self._texts = make_texts(rng, TEXTS)
        self._mover = Mover(client, rng, self.counts)

    async def prepare(self) -> None:
        self._texts = await with_answers(self._client, self._texts)

    async def cycle(self) -> None:
        """Requests before, in and after a sleep; at the end the engine is awake and idle."""
        aborts = self._mover.aborts
        before = [asyncio.ensure_future(self._ask()) for _ in range(self._rng.randint(0, 4))]
        await asyncio.sleep(self._rng.choice([0, 0.002, 0.01]))
        sleeping = asyncio.ensure_future(self._mover.sleep())
        meanwhile = [asyncio.ensure_future(self._ask()) for _ in range(self._rng.randint(0, 2))]
        await sleeping
        if self._rng.random() < 0.2:
            await self._mover.deepen()
        if self._client.state is EngineState.ASLEEP:
            assert await self._ask() is End.ASLEEP, "a request was served by a sleeping engine"
        await self._mover.wake()
        ends = await asyncio.gather(*before, *meanwhile)
        assert End.ABORTED not in ends or self._mover.aborts > aborts, "a request was aborted, and no sleep asked for it"
        assert await self._ask(leaves=False) is End.WHOLE, "the engine does not serve after its wake"

    async def _ask(self, leaves: bool = True) -> End:
        leave_after = 1 if leaves and self._rng.random() < 0.1 else None
        end = (await ask(self._client, self._rng.choice(self._texts), leave_after=leave_after)).end
        self.counts[f"requests {end.value}"] += 1
        return end

    async def look(self, cycle: int) -> Footprint:
        """Idle, every text right, nothing allocated, the books in order."""
        await self._mover.all_to_host()
        for text in self._texts:
            assert (await ask(self._client, text)).end is End.WHOLE
        stats = await self._client.stats()
        assert stats["cache"]["allocated_blocks"] == 0, stats["cache"]
        assert stats["memory"]["condemned_bytes"] == 0, stats["memory"]
        assert self._client._core.core is not None
        self._client._core.core.executor.worker.memory.check_integrity()  # type: ignore[attr-defined]
        return measure(cycle, [stats])
