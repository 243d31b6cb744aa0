"""M11: what of the memory that a sleep unmapped is still held, and by whom.

Facts used, all per piece of memory, never device-wide: a memfd lives while any process maps it or has it open, and /proc shows
both by inode; a long-term pin of this process counts in VmPin, whether or not the page is still mapped anywhere; where the
driver's memory has no inode (cuda) an open grant is all that is known, and is believed.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torpor.memory.ledger import ExportLedger
from torpor.memory.procfs import Inode, command_of, open_memfds, processes, read_mappings
from torpor.memory.segment import Segment
from torpor.memory.types import Holder


@dataclass(frozen=True, kw_only=True)
class Traces:
    """Of one pool's memory, taken just before it is unmapped."""

    tag: str
    mapping: int
    extents: dict[Segment, tuple[tuple[Inode, int], ...]]  # of segments that other processes may have
    exported: frozenset[Segment]
    pinned_at_map: int  # unexplained bytes of VmPin then; or later, when a hook explained what was pinned
    exportable: bool


@dataclass(frozen=True, kw_only=True)
class Account:
    unmapped_bytes: int
    returned_bytes: int
    holders: tuple[Holder, ...]


def take_traces(tag: str, mapping: int, exportable: bool, segments: Sequence[Segment]) -> Traces:
    """Nobody else can hold memory that was neither exported nor inherited by a fork: only the rest leaves inodes to look for."""
    extents = {s: tuple(((e.device_id, e.inode), e.nbytes) for e in s.region.extents()) for s in segments if s.may_be_held}
    pinned = min((s.pinned_at_map for s in segments), default=0)
    exported = frozenset(s for s in segments if s.exported)
    return Traces(tag=tag, mapping=mapping, extents=extents, exported=exported, pinned_at_map=pinned, exportable=exportable)


def account(traces: Sequence[Traces], unmapped: dict[str, list[Segment]], ledger: ExportLedger, pins: int) -> dict[str, Account]:
    """Per tag. What cannot be shown to be back is not counted as returned. ``pins``: of this process, less what is known to be
    memory of other tags."""
    sizes = {inode: size for t in traces for s, pieces in t.extents.items() if not s.mapped for inode, size in pieces if inode[1]}
    found = _find_holders(sizes)
    attributed = 0
    accounts = {}
    # Pins are known by their sum only. A transport pins what it was given, so exportable pools are asked first.
    for trace in sorted(traces, key=lambda t: not t.exportable):
        segments = unmapped[trace.tag]
        total = sum(s.nbytes for s in segments)
        held, holders = _held_by_others(trace, segments, found, sizes, ledger)
        growth = max(0, pins - trace.pinned_at_map - attributed)
        pinned = min(growth, max(0, total - held))
        if pinned:
            holders.append(Holder(who=f"pinned by this process (pid {os.getpid()})", bytes=pinned))
            attributed += pinned
        returned = total - held - pinned
        accounts[trace.tag] = Account(unmapped_bytes=total, returned_bytes=returned, holders=tuple(holders))
    return accounts


def _held_by_others(
    trace: Traces, segments: Iterable[Segment], found: dict[int, set[Inode]], sizes: dict[Inode, int], ledger: ExportLedger
) -> tuple[int, list[Holder]]:
    """(bytes held by anybody, each holder's own bytes). Several may hold the same piece."""
    gone = set(segments)
    mine = {inode for s, pieces in trace.extents.items() if s in gone for inode, _ in pieces if inode[1]}
    holders, held = [], set[Inode]()
    for pid, inodes in sorted(found.items()):
        if inodes & mine:
            held |= inodes & mine
            holders.append(Holder(who=_name_of(pid, ledger), bytes=sum(sizes[i] for i in inodes & mine)))
    total = sum(sizes[i] for i in held)
    exported = sum(s.nbytes for s in trace.exported & gone)
    unseen = [g for g in ledger.grants(trace.tag, trace.mapping) if not _can_be_seen(g.pid, has_inodes=bool(mine))]
    if unseen and exported:
        holders += [Holder(who=f"{grant}, which cannot be looked into", bytes=exported) for grant in unseen]
        others = {inode for s, pieces in trace.extents.items() if s in gone - trace.exported for inode, _ in pieces}
        total = exported + sum(sizes[i] for i in held & others)
    return total, holders


def _find_holders(sizes: dict[Inode, int]) -> dict[int, set[Inode]]:
    """Which process holds which of these pieces, by a mapping or an open descriptor; without processes that may not be read."""
    found: dict[int, set[Inode]] = defaultdict(set)
    if sizes:
        for pid in processes():
            with contextlib.suppress(OSError):
                found[pid] |= {m.inode for m in read_mappings(pid) if m.inode in sizes}
                found[pid] |= {inode for _, inode in open_memfds(pid) if inode in sizes}
    return found


def _can_be_seen(pid: int | None, has_inodes: bool) -> bool:
    """Looking at the process would have shown what it holds; a process that is gone holds nothing."""
    if pid is None or not has_inodes:
        return False
    if not os.path.exists(f"/proc/{pid}"):
        return True
    try:
        os.listdir(f"/proc/{pid}/fd")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _name_of(pid: int, ledger: ExportLedger) -> str:
    if pid == os.getpid():
        return "this process (an import or an open descriptor)"
    return ledger.name_of(pid) or f"process {pid} ({command_of(pid)})"
