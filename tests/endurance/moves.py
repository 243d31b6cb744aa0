"""Random sleeps and wakes of one engine, from a generator of random numbers that the caller has seeded."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

from torpor.engine.base import LEVELS, SLEEP_MODES, EngineClient, EngineState, SleepMode, SleepRequest
from torpor.errors import SleepAborted, StateError
from torpor.memory.types import POLICIES

TAGS = ("weights", "kv_cache", "runtime")
ALIVE = (EngineState.AWAKE, EngineState.PAUSED, EngineState.ASLEEP)


class Mover:
    """Every report is looked at: memory that was unmapped was given back, and a failed sleep left the engine serving."""

    def __init__(self, client: EngineClient, rng: random.Random, counts: Counter[str]) -> None:
        self._client = client
        self._rng = rng
        self._counts = counts
        self.aborts = 0  # sleeps of mode abort so far

    async def all_to_host(self) -> None:
        """Images of everything: what is committed for them is the same each time."""
        self._look(await self._client.sleep(SleepRequest(policies=dict.fromkeys(TAGS, "host"))))
        await self._client.wake_up()

    async def sleep(self) -> None:
        """One of the ways into a sleep or a pause. Afterwards the engine is awake, paused or asleep."""
        ways = [self._by_level] * 6 + [self._by_policies] * 3 + [self._release_kv, self._pause, self._impatient, self._fickle]
        await self._rng.choice(ways)()
        assert self._client.state in ALIVE, self._client.state

    async def deepen(self) -> None:
        """From one asleep state to another, or nothing to do."""
        if self._client.state is EngineState.ASLEEP:
            self._counts["asleep to asleep"] += 1
            try:
                await self._ask(self._rng.choice([self._level(), self._policies()]))
            except StateError as error:  # what was discarded cannot be kept any more
                self._expect(error, "is lost" in str(error), EngineState.ASLEEP)

    async def wake(self) -> None:
        """At once, or tag by tag; the engine serves only when everything is back (E7)."""
        tags = list(TAGS)
        self._rng.shuffle(tags)
        for tag in tags[: self._rng.choice([0, 0, 1, 2, 3])]:
            if self._client.state is EngineState.ASLEEP:
                report = await self._client.wake_up([tag])
                assert bool(report["missing_tags"]) == (report["state"] == "asleep"), report
                self._counts["partial wakes"] += 1
        report = await self._client.wake_up()
        assert report["state"] == "awake", report
        self._counts["wakes"] += 1

    # ---- ways to sleep -------------------------------------------------------------------------------------------------------

    async def _by_level(self) -> None:
        await self._ask(self._level())

    async def _by_policies(self) -> None:
        await self._ask(self._policies())

    async def _release_kv(self) -> None:
        self._counts["release_kv_cache"] += 1
        self._look(await self._client.release_kv_cache_memory())

    async def _pause(self) -> None:
        mode = self._mode()
        self._counts["pauses"] += 1
        await self._client.pause(mode)

    async def _impatient(self) -> None:
        """A deadline that passes while requests run undoes the sleep."""
        self._counts["deadlines"] += 1
        try:
            self._look(await self._client.sleep(SleepRequest(level=1, mode="wait", deadline_s=0.0)))
        except SleepAborted as error:
            self._expect(error, error.fields["reason"] == "deadline", EngineState.AWAKE)

    async def _fickle(self) -> None:
        """A wake meets the sleep at whatever it is doing (E8)."""
        self._counts["wakes in a sleep"] += 1
        sleeping = asyncio.ensure_future(self._client.sleep(self._level()))
        await asyncio.sleep(self._rng.random() * 0.005)
        await self._client.wake_up()
        with suppress(SleepAborted):
            self._look(await sleeping)
        if self._client.state is not EngineState.AWAKE:  # the wake came first: it found nothing to do
            await self._client.wake_up()

    # ---- what is asked -------------------------------------------------------------------------------------------------------

    def _mode(self) -> SleepMode:
        mode = self._rng.choice(SLEEP_MODES)
        self.aborts += mode == "abort"
        return mode

    def _level(self) -> SleepRequest:
        return SleepRequest(level=self._rng.choice(LEVELS), mode=self._mode())

    def _policies(self) -> SleepRequest:
        chosen = self._rng.sample(TAGS, self._rng.randint(1, 3))
        return SleepRequest(mode=self._mode(), policies={tag: self._rng.choice(POLICIES) for tag in chosen})

    async def _ask(self, request: SleepRequest) -> None:
        self._counts[f"mode {request.mode}"] += 1
        self._counts["policies" if request.policies else f"level {request.level}"] += 1
        self._look(await self._client.sleep(request))

    def _expect(self, error: StateError, right: bool, state: EngineState) -> None:
        """``error`` again, unless it says what it must and the engine is in the state that goes with it."""
        if not right or self._client.state is not state:
            raise error

    def _look(self, report: dict[str, object]) -> None:
        assert report["returned_bytes"] == report["unmapped_bytes"], report
        self._counts["unmapped"] += bool(report["unmapped_bytes"])
