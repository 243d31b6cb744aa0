"""What long runs have in common: cycles, and looks at what the process holds."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

from footprint import Footprint

CYCLE_S = 60.0  # none of them takes a second


class Run(ABC):
    def __init__(self, seed: int, say: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self._say = say
        self._cycle = 0

    @abstractmethod
    async def cycle(self) -> None: ...

    @abstractmethod
    async def look(self, cycle: int) -> Footprint:
        """What is held when nothing runs. AssertionError where anything is not as it should be then."""

    async def run_to(self, mark: int) -> Footprint:
        """As many cycles as are missing, and a look. AssertionError names the cycle and the seed."""
        await self.run_cycles(mark)
        footprint = await self.look(mark)
        self._say(str(footprint))
        return footprint

    async def run_cycles(self, mark: int) -> None:
        while self._cycle < mark:
            self._cycle += 1
            try:
                await asyncio.wait_for(self.cycle(), CYCLE_S)
            except (AssertionError, asyncio.TimeoutError) as error:
                raise AssertionError(f"cycle {self._cycle} of seed {self._seed}: {error or 'it hangs'}") from error
