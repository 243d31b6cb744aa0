"""Descriptors of a pool's memory, for other processes."""

from __future__ import annotations

import os

from torpor.errors import ConfigurationError, StateError
from torpor.memory.ledger import ExportedPool, ExportedRegion
from torpor.memory.pool import Pool
from torpor.memory.segment import Segment
from torpor.memory.types import Residency


def export_pool(pool: Pool) -> ExportedPool:
    """Under the memory's lock. After a DeviceError no descriptor is left open."""
    if not pool.settings.exportable:
        message = f"pool {pool.tag!r} was not made exportable: make it with pool({pool.tag!r}, exportable=True)"
        raise ConfigurationError(message, setting="exportable", value=False)
    residency = pool.residency
    if residency is not Residency.RESIDENT:
        raise StateError(
            f"pool {pool.tag!r} is {residency.value}: wake([{pool.tag!r}]) first", state=residency.value, tag=pool.tag
        )
    regions: list[ExportedRegion] = []
    try:
        for segment in pool.segments:
            regions.append(_export(segment))  # noqa: PERF401  (what is done so far must be closed when one fails)
    except BaseException:
        for region in regions:
            for fd in region.fds:
                os.close(fd)
        raise
    return ExportedPool(tag=pool.tag, mapping=pool.mapping, regions=tuple(regions))


def _export(segment: Segment) -> ExportedRegion:
    segment.exported = True
    return ExportedRegion(
        address=segment.address,
        nbytes=segment.nbytes,
        extents=tuple(e.nbytes for e in segment.region.extents()),
        fds=segment.region.export(),
    )
