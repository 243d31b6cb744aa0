"""How a list of blocks is copied out of a mapped KV cache: in as few calls of the device's copy engine as there can be.

The blocks of all layers' K and V that lie in one region are counted from one base, in units of a block: one call moves them all.

    base                                           ids of block b in array a: starts[a] + b
    | K of layer 0: 0 1 2 ... | V of layer 0 | K of layer 1 | ...
    ^ starts[0] = 0           ^ starts[1]    ^ starts[2]

A call of a few blocks takes some 30 us on an H200; by layer there would be 72 of them for a model of 36.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torpor.connectors.geometry import Geometry

Ids = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Lane:
    """Arrays that one call can address. ``dst`` and ``src`` are addresses, ``*_starts`` the ids of every array's block 0."""

    dst: int
    src: int
    dst_starts: Ids
    src_starts: Ids

    def pieces(self, local: Ids, remote: Ids, blocks: int) -> Iterator[tuple[Ids, Ids]]:
        """(destination ids, source ids) of at most ``blocks`` blocks each, array by array, so that neighbours stay together.
        Valid until the next: they lie in one buffer, since the system takes longer to give memory than the sums take."""
        if not len(local):
            return
        arrays = max(1, blocks // len(local))
        buffer = np.empty((2, min(arrays, len(self.dst_starts)), len(local)), dtype=np.uint64)
        for first in range(0, len(self.dst_starts), arrays):
            dst, src = self.dst_starts[first : first + arrays, None], self.src_starts[first : first + arrays, None]
            dst_ids = np.add(dst, local, out=buffer[0, : len(dst)]).reshape(-1)
            src_ids = np.add(src, remote, out=buffer[1, : len(src)]).reshape(-1)
            for start in range(0, len(dst_ids), blocks):
                yield dst_ids[start : start + blocks], src_ids[start : start + blocks]


def lanes(ours: Geometry, theirs: Geometry) -> list[Lane]:
    """Every array of K or V once. Arrays share a lane when they lie in the same regions, whole blocks apart, on both sides."""
    block_bytes = ours.spec.block_bytes
    groups: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    halves = [place for place in zip(ours.places, theirs.places, strict=True) for _ in range(2)]
    for (here, there), dst, src in zip(halves, ours.arrays(), theirs.arrays(), strict=True):
        key = (here.region, there.region, dst % block_bytes, src % block_bytes)
        groups.setdefault(key, []).append((dst, src))
    return [_lane(pairs, block_bytes) for pairs in groups.values()]


def _lane(pairs: Sequence[tuple[int, int]], block_bytes: int) -> Lane:
    dst, src = min(d for d, _ in pairs), min(s for _, s in pairs)
    return Lane(
        dst,
        src,
        np.array([(d - dst) // block_bytes for d, _ in pairs], dtype=np.uint64),
        np.array([(s - src) // block_bytes for _, s in pairs], dtype=np.uint64),
    )
