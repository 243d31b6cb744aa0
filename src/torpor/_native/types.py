"""What the native core says of itself, as plain data. The numbers are those of ``torpor.h``."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

CopyKind = Literal["to_host", "to_device", "device"]
COPY_KINDS: dict[str, int] = {"to_host": 0, "to_device": 1, "device": 2}


class Op(enum.IntEnum):
    """Driver calls, the points where faults can be injected."""

    RESERVE = 0
    FREE_ADDRESS = 1
    CREATE = 2
    RELEASE = 3
    MAP = 4
    SET_ACCESS = 5
    UNMAP = 6
    EXPORT = 7
    IMPORT = 8
    COPY = 9
    HASH = 10
    COMMIT = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """A device's live resources; bytes except for the counts."""

    granularity: int
    live_regions: int
    live_extents: int
    live_imports: int
    live_arenas: int
    reserved_bytes: int
    mapped_bytes: int
    condemned_bytes: int
    imported_bytes: int
    committed_bytes: int
    spare_bytes: int  # host memory that was taken ahead and is committed by nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """How far an arena has got with the last ``commit_ahead``."""

    asked_bytes: int
    taken_bytes: int
    seconds: float  # from its begin to the last part that it took
    active: bool  # some of it is still to come
    failure: str  # why it ended early; "" when it did not


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentInfo:
    """One piece of physical memory.

    On ``host`` (device_id, inode) name its memfd as ``/proc`` shows it; both are 0 on ``cuda``.
    """

    nbytes: int
    device_id: int
    inode: int
    rdma: bool  # a network card can be given access to it
