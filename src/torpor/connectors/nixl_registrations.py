"""What an agent has registered of the KV cache, remembered step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torpor.connectors.nixl_agent import Agent
from torpor.errors import TransportError


@dataclass(frozen=True, slots=True)
class Registered:
    address: int
    nbytes: int
    handle: Any  # NIXL's


class Registrations:
    """One registration per range: a region of the pool, which many tensors share. NIXL takes a list of ranges in one call too,
    and after a failure in the middle of it says of none whether it is registered."""

    def __init__(self, agent: Agent, kind: str, device: int) -> None:
        self._agent = agent
        self._kind = kind
        self._device = device
        self._made: list[Registered] = []

    @property
    def nbytes(self) -> int:
        return sum(registered.nbytes for registered in self._made)

    def add(self, ranges: Sequence[tuple[int, int]]) -> None:
        """(address, bytes) each: all or nothing. TransportError; what could not be taken back then is left for ``drop``."""
        try:
            for address, nbytes in ranges:
                handle = self._agent.register([(address, nbytes)], self._kind, self._device)
                self._made.append(Registered(address, nbytes, handle))
        except TransportError:
            with contextlib.suppress(TransportError):
                self.drop()
            raise

    def drop(self) -> None:
        """Tries every one, newest first, also after one that fails. TransportError when some are left; the next call tries those.
        Idempotent."""
        left, reasons = list[Registered](), list[str]()
        for registered in reversed(self._made):
            try:
                self._agent.deregister(registered.handle)
            except TransportError as error:
                left.insert(0, registered)
                reasons.append(str(error))
        self._made = left
        if left:
            raise TransportError(
                f"NIXL still has {len(left)} of the KV cache's ranges ({self.nbytes} bytes): {reasons[0]}",
                transport="nixl",
                bytes=self.nbytes,
            )
