"""A prefill/decode pair that is asked all the time while either or both of its engines sleep."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from engine_models import tiny_engine
from footprint import Footprint, measure, observe
from moves import Mover
from runs import CYCLE_S, Run
from texts import End, Text, ask, make_texts, with_answers

from torpor.connectors.config import ConnectorConfig
from torpor.engine.base import EngineState
from torpor.engine.client import InprocEngineClient
from torpor.router.bodies import PREFILL_PARAMS

START_S = 90.0
TEXTS = 12
CLIENTS = 4
RETRY_S = 0.005


async def endure(
    folder: Path, connector: str, cycles: int, seed: int, say: Callable[[str], None], rounds: int = 0
) -> list[Footprint]:
    """As ``one_engine.endure``."""
    async with AsyncExitStack() as stack:
        engines = []
        for role in ("producer", "consumer"):
            kv = ConnectorConfig(connector=connector, role=role, extra={"staging_bytes": 1 << 20} if connector == "nixl" else {})  # type: ignore[arg-type]
            config = tiny_engine(folder, num_blocks=192, connector=kv, handoff_lease_s=5.0)
            engines.append(await InprocEngineClient.start(config, timeout_s=START_S))
            stack.push_async_callback(engines[-1].shutdown)
        run = LoadedPair(engines[0], engines[1], seed, say)
        await run.prepare()
        figures = await observe(run.run_to, cycles, rounds)
        say(f"pair over {connector}, seed {seed}, {figures[-1].cycle} cycles: {dict(sorted(run.counts.items()))}")
        return figures


class LoadedPair(Run):
    def __init__(self, prefill: InprocEngineClient, decode: InprocEngineClient, seed: int, say: Callable[[str], None]) -> None:
        rng = random.Random(seed)
        super().__init__(seed, say)
        self._prefill = prefill
        self._decode = decode
        self._rng = rng
        self._texts = make_texts(rng, TEXTS)
        self._movers = {"P": Mover(prefill, rng, self.counts), "D": Mover(decode, rng, self.counts)}
        self._load: list[asyncio.Task[None]] = []
        self._stopping = False

    async def prepare(self) -> None:
        self._texts = await with_answers(self._decode, self._texts)

    def under_load(self) -> LoadedPair:
        return self

    async def __aenter__(self) -> LoadedPair:
        self._stopping = False
        self._load = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stopping = True
        await asyncio.wait_for(asyncio.gather(*self._load), CYCLE_S)

    async def run_cycles(self, mark: int) -> None:
        async with self.under_load():
            await super().run_cycles(mark)

    async def cycle(self) -> None:
        """One or both sleep and wake, in any order; the load never stops."""
        await asyncio.sleep(self._rng.random() * 0.03)
        who = self._rng.choice([["P"], ["D"], ["P", "D"]])
        movers = [self._movers[name] for name in who]
        self.counts[f"slept {'+'.join(who)}"] += 1
        await asyncio.gather(*(mover.sleep() for mover in movers))
        if self._rng.random() < 0.2:
            await movers[0].deepen()
        await asyncio.sleep(self._rng.random() * 0.02)
        self._rng.shuffle(movers)
        if self._rng.random() < 0.5:
            await asyncio.gather(*(mover.wake() for mover in movers))
        else:
            for mover in movers:
                await mover.wake()
        for task in self._load:
            if task.done():  # a client found something wrong
                task.result()

    async def look(self, cycle: int) -> Footprint:
        """Idle, and a transfer works, so that the link is up at every look; hand-offs nobody fetched are gone."""
        for mover in self._movers.values():
            await mover.all_to_host()
        loads = (await self._decode.stats())["scheduler"]["loads_done"]
        for text in self._texts:
            assert await self._through_both(text, leaves=False) is End.WHOLE
        assert (await self._decode.stats())["scheduler"]["loads_done"] > loads, "no KV came from P: D computed everything itself"
        deadline = asyncio.get_running_loop().time() + 20
        while True:
            stats = [await self._prefill.stats(), await self._decode.stats()]
            if all(s["cache"]["allocated_blocks"] == 0 for s in stats):
                break
            assert asyncio.get_running_loop().time() < deadline, [s["cache"] for s in stats]
            await asyncio.sleep(0.05)
        for client in (self._prefill, self._decode):
            assert client.state is EngineState.AWAKE
            assert client._core.core is not None
            client._core.core.executor.worker.memory.check_integrity()  # type: ignore[attr-defined]
        self.counts["loads done"] = stats[1]["scheduler"]["loads_done"]
        self.counts["loads failed"] = stats[1]["scheduler"]["loads_failed"]
        return measure(cycle, stats)

    # ---- the load ------------------------------------------------------------------------------------------------------------

    async def _client(self) -> None:
        while not self._stopping:
            end = await self._through_both(self._rng.choice(self._texts))
            self.counts[f"requests {end.value}"] += 1
            if end is End.ASLEEP:
                await asyncio.sleep(RETRY_S)

    async def _through_both(self, text: Text, leaves: bool = True) -> End:
        """As the router does it: what P does not hand over, D computes."""
        transfer: dict[str, Any] | None = None
        if len(text.prompt) > 4:
            transfer = (await ask(self._prefill, text, transfer=PREFILL_PARAMS, max_tokens=1)).transfer
        leave_after = 1 if leaves and self._rng.random() < 0.1 else None
        return (await ask(self._decode, text, transfer=transfer, leave_after=leave_after)).end
