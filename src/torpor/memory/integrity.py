"""Compares what the memory layer believes with what the native library and the kernel say."""

from __future__ import annotations

from collections.abc import Sequence

from torpor.errors import BugError
from torpor.memory.pool import Pool
from torpor.memory.procfs import Mapping, read_mappings
from torpor.memory.segment import Segment
from torpor.memory.shared import Shared


def check_integrity(shared: Shared, pools: Sequence[Pool], owns_device: bool) -> None:
    """BugError naming everything that disagrees. Under the memory's lock. ``owns_device``: nobody else uses the device."""
    segments = [s for p in pools for s in p.segments]
    for segment in segments:
        segment.layout.check()
    shared.images.check(segments)
    problems = [text for s in segments for text in _content_problems(s, shared.config.chunk_bytes)]
    problems += _device_problems(shared, segments, owns_device)
    if shared.on_host:
        mappings = read_mappings()
        problems += [text for s in segments for text in _kernel_problems(s, mappings)]
    if problems:
        raise BugError("; ".join(problems))


def _content_problems(segment: Segment, chunk_bytes: int) -> list[str]:
    if segment.dying:
        return []
    problems = []
    if not segment.mapped and not segment.stale:
        problems.append(f"an unmapped region of {segment.tag!r} claims to hold its content")
    if segment.stale and not segment.owner.lost:
        live = segment.live(chunk_bytes)
        if live.any() and (segment.image is None or not segment.image.valid[live].all()):
            problems.append(f"a region of {segment.tag!r} has its content neither in memory nor in an image")
    return problems


def _device_problems(shared: Shared, segments: Sequence[Segment], owns_device: bool) -> list[str]:
    stats = shared.device.stats()
    pairs = {
        "live_regions": (stats.live_regions, len(segments)),
        "mapped_bytes": (stats.mapped_bytes, sum(s.nbytes for s in segments if s.mapped)),
        "committed_bytes": (stats.committed_bytes, shared.backing.committed_bytes),
    }
    wrong = {name: pair for name, pair in pairs.items() if pair[0] < pair[1] or (owns_device and pair[0] != pair[1])}
    return [f"{name}: the device says {device}, the pools say {ours}" for name, (device, ours) in wrong.items()]


def _kernel_problems(segment: Segment, mappings: Sequence[Mapping]) -> list[str]:
    """A mapped region is tiled by its own extents, memory files or anonymous memory, readable and writable; an unmapped one has
    neither in its range, but for what the driver refused to take away, which counts as condemned."""
    start, end = segment.address, segment.address + segment.nbytes
    inside = [m for m in mappings if m.start < end and m.end > start]
    files = [m for m in inside if m.inode[1]]
    anonymous = [] if segment.owner.settings.guarded else [m for m in inside if not m.inode[1] and m.permissions != "---p"]
    where = f"region {start:#x} of {segment.tag!r}"
    if not segment.mapped:
        there = _bytes_within(files + anonymous, start, end)
        return [f"{where} is asleep, yet the kernel maps memory there"] if there > segment.region.condemned_bytes else []
    extents = segment.region.extents()
    in_files = sum(e.nbytes for e in extents if e.inode)
    seen = _bytes_within([m for m in files if m.permissions == "rw-s"], start, end)
    seen_anonymous = _bytes_within([m for m in anonymous if m.permissions == "rw-p"], start, end)
    known = {m.inode for m in files} == {(e.device_id, e.inode) for e in extents if e.inode}
    if not known or (seen, seen_anonymous) != (in_files, segment.nbytes - in_files):
        return [f"{where} is mapped, yet the kernel does not map its {segment.nbytes} bytes there"]
    return []


def _bytes_within(mappings: Sequence[Mapping], start: int, end: int) -> int:
    return sum(min(m.end, end) - max(m.start, start) for m in mappings)
