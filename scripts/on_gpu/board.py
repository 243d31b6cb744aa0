"""Which part runs next, and on which GPU: a pure decision, so that it can be played through without running anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from parts import Part, Use

SHARE = 6
"""Parts that may share a GPU at once: four took a quarter of 32 cores."""
QUIET_SHARE = 2
"""While something is measured on another GPU."""


Takes = Callable[[Part], float]


@dataclass(frozen=True)
class Start:
    """``gpus``: their numbers, from 0. ``limit_s``: its own, or what is left for it."""

    part: Part
    gpus: tuple[int, ...]
    limit_s: float


class Board:
    """Parts are begun in their order wherever they may, but one that does not fit into what is left of the time is passed over.

    Those that need the whole machine come last, and their time is kept for them.
    """

    def __init__(self, parts: Sequence[Part], gpus: int, share: int = SHARE) -> None:
        self.waiting = sorted(parts, key=lambda part: part.use is Use.WHOLE)
        self.running: dict[str, Start] = {}
        self._gpus, self._share = gpus, share

    def begin(self, left_s: float) -> list[Start]:
        """What begins now. ``left_s``: until everything must have ended."""
        begun = []
        while start := self._next(left_s):
            self.waiting.remove(start.part)
            self.running[start.part.name] = start
            begun.append(start)
        return begun

    def end(self, part: Part) -> None:
        del self.running[part.name]

    def left_for(self, part: Part, left_s: float) -> float:
        kept_s = sum(other.takes_s for other in self.waiting if other.use is Use.WHOLE)
        return left_s if part.use is Use.WHOLE else left_s - kept_s

    def _next(self, left_s: float) -> Start | None:
        for part in self.waiting:
            left = self.left_for(part, left_s)
            if part.takes_s <= left and (gpus := self._place_of(part, left)):
                return Start(part, gpus, min(part.limit_s, left))
        return None

    def _place_of(self, part: Part, left_s: float) -> tuple[int, ...]:
        """Empty: not now."""
        if any(start.part.use is Use.WHOLE for start in self.running.values()):
            return ()
        if part.use is Use.WHOLE:
            return () if self.running else tuple(range(self._gpus))
        measured = any(other.use is Use.MEASURED and other.takes_s <= left_s for other in self.waiting)
        gpus = [0] if part.use is Use.MEASURED else list(range(1 if measured else 0, self._gpus))
        free = [gpu for gpu in gpus if self._may_use(gpu, part)]
        return (min(free, key=lambda gpu: len(self._on(gpu))),) if free else ()

    def _may_use(self, gpu: int, part: Part) -> bool:
        here = self._on(gpu)
        shared = part.use is Use.SHARED and all(other.use is Use.SHARED for other in here)
        return len(here) < self._most() if shared else not here

    def _most(self) -> int:
        measuring = any(start.part.use is Use.MEASURED for start in self.running.values())
        return min(self._share, QUIET_SHARE) if measuring else self._share

    def _on(self, gpu: int) -> list[Part]:
        return [start.part for start in self.running.values() if gpu in start.gpus]


def played(
    parts: Sequence[Part], gpus: int, share: int, left_s: float, takes: Takes | None = None
) -> Iterator[tuple[float, Start, float]]:
    """(begun at, start, ended at) of every part that would begin, if each took ``takes(part)`` seconds, or its ``takes_s``."""
    board, now = Board(parts, gpus, share), 0.0
    until: dict[str, float] = {}
    while True:
        for start in board.begin(left_s - now):
            takes_s = takes(start.part) if takes else start.part.takes_s
            until[start.part.name] = now + min(takes_s, start.limit_s)
            yield now, start, until[start.part.name]
        if not until:
            return
        name = min(until, key=until.__getitem__)
        now = until.pop(name)
        board.end(board.running[name].part)
