"""What requests and moves of the pair share: the two engines, and what was handed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pair_sides import LEASE_S, Side

from torpor.engine.base import EngineState
from torpor.errors import AsleepError
from torpor.kvcache.prefix import HashChain
from torpor.testing.clock import FakeClock

S = EngineState


@dataclass
class HandedOff:
    prompt: list[int]
    params: dict[str, Any]
    epoch: str
    alive: bool | None = True  # None: nobody can say


class PairBase:
    connector: ClassVar[str] = "ipc"
    sides: dict[str, Side]
    hand_offs: list[HandedOff]
    clock: FakeClock

    @property
    def p(self) -> Side:
        return self.sides["P"]

    @property
    def d(self) -> Side:
        return self.sides["D"]

    def _hand_off(self, which: int) -> HandedOff:
        """Newer ones more often."""
        return self.hand_offs[-1 - which % len(self.hand_offs)]

    def _loads(self) -> tuple[int, int, int]:
        stats = self.d.core.stats()
        assert stats.connector is not None
        return stats.scheduler.loads_done, stats.scheduler.loads_failed, stats.connector.bytes_received

    def _local_hit(self, prompt: list[int]) -> int:
        return self.d.core.scheduler.kv.find_prefix(prompt, HashChain()).num_tokens

    def _end_leases_in_the_way(self) -> None:
        """P's requests wait for blocks that hand-offs have, and nobody reads those now."""
        if self.p.waits_for_readers():
            self.clock.advance(LEASE_S + 1)
            for hand_off in self.hand_offs:
                hand_off.alive = None if hand_off.alive else hand_off.alive

    def _look_at_epochs(self) -> None:
        for hand_off in self.hand_offs:
            if hand_off.epoch != self.p.epoch:
                hand_off.alive = False

    def _check_refusal(self, side: Side, error: Exception, name: str) -> None:
        if isinstance(error, AsleepError):
            assert side.state in (S.DRAINING, S.SLEEPING, S.ASLEEP, S.WAKING), side.state
        else:
            in_use = name in side.core.scheduler._queues.by_id
            assert in_use or "prompt" in str(error) or "kv_transfer_params" in str(error), error
