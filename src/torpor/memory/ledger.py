"""Who was given this process's memory: exports as descriptors, and the grants that name the peers who hold them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRegion:
    """``extents`` are the sizes of its pieces, one after another from ``address`` on; ``fds`` are theirs, in order."""

    address: int
    nbytes: int
    extents: tuple[int, ...]
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPool:
    """Descriptors of one mapping of a pool. They are the caller's: pass them on and ``close()``, or leave the ``with`` block."""

    tag: str
    mapping: int  # which mapping of the pool: goes up whenever a wake maps it anew
    regions: tuple[ExportedRegion, ...]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.regions)

    def close(self) -> None:
        """Closes the descriptors. Once only: afterwards the numbers may belong to somebody else."""
        for region in self.regions:
            for fd in region.fds:
                os.close(fd)

    def __enter__(self) -> ExportedPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """``peer`` was given descriptors of one mapping of ``tag``. ``pid`` None: a peer whose process is not visible from here."""

    id: int
    peer: str
    tag: str
    pid: int | None
    mapping: int

    def __str__(self) -> str:
        return f"peer {self.peer}" + ("" if self.pid is None else f" (pid {self.pid})")


@dataclass
class ExportLedger:
    """Thread-safe, and free of the memory's lock: peers acknowledge on other threads while a sleep waits for them in a hook."""

    _mapping_of: Callable[[str], int]
    _grants: dict[int, Grant] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def grant(self, peer: str, tag: str, pid: int | None = None) -> Grant:
        """Notes that ``peer`` holds the present mapping of ``tag``. UnknownTagError."""
        mapping = self._mapping_of(tag)
        with self._lock:
            grant = Grant(id=next(self._ids), peer=peer, tag=tag, pid=pid, mapping=mapping)
            self._grants[grant.id] = grant
        return grant

    def end(self, grant: Grant) -> None:
        """The peer let go, or is gone. Ending it again does nothing."""
        with self._lock:
            self._grants.pop(grant.id, None)

    def grants(self, tag: str | None = None, mapping: int | None = None) -> tuple[Grant, ...]:
        """The open ones, oldest first; of one tag, of one mapping."""
        with self._lock:
            found = tuple(self._grants.values())
        return tuple(g for g in found if tag in (None, g.tag) and mapping in (None, g.mapping))

    def name_of(self, pid: int) -> str | None:
        """The peer with this process, if one was ever granted something it has not ended."""
        return next((str(g) for g in self.grants() if g.pid == pid), None)
