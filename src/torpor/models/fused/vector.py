"""Products of a single token. All of the work is reading the weights, so they are read once, in order, by kernels that also do
what a layer does before and after a product.

Rounding is that of the separate kernels of ``ops``; sums are added up in another order than cuBLAS adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Parameters(Protocol):
    """Of a linear layer."""

    @property
    def weight(self) -> torch.Tensor: ...  # [columns, depth], contiguous

    @property
    def bias(self) -> torch.Tensor | None: ...


_DEEP = 4096


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes. Depth must cover all of it where x is normed."""

    columns: int
    depth: int
    num_warps: int


def tile_for(depth: int, *, normed: bool, gated: bool) -> Tile:
    """Measured in whole steps of Qwen3-8B on an H200: other tiles, of 1 to 8 columns, cost up to 150 us a step of 4.1 ms."""
    covering = 1 << (depth - 1).bit_length()
    if normed:
        # x and its norm are computed by every program, so one computes several columns; more would take too many registers.
        most = 16384 if gated else 8192  # weights of one tile
        return Tile(columns=max(1, most // covering), depth=covering, num_warps=8 if gated else 4)
    if depth > _DEEP:
        return Tile(columns=2, depth=min(covering, 4 * _DEEP), num_warps=16)
    return Tile(columns=4, depth=min(covering, 1024), num_warps=4)


def product(
    x: torch.Tensor,
    linear: Parameters,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [1, depth] by ``linear``, contiguous, on a GPU with Triton -> [1, columns]. On the current stream; blocks on nothing.

    norm: x is normed first, with these weights [depth]. gated: the first half of the columns is the gate, the second what it
    opens for: silu(gate) * up, half as many columns. residual [1, columns]: the product is added to it in place, and it is what
    is returned.
    """
    from torpor.models.fused.vector_kernel import vector_kernel

    weight, bias, depth = linear.weight, linear.bias, x.shape[1]
    columns = len(weight) // 2 if gated else len(weight)
    tile = tile or tile_for(depth, normed=norm is not None, gated=gated)
    if norm is not None and tile.depth < depth:
        raise ValueError(f"a tile of {tile.depth} cannot norm {depth} values")
    out = x.new_empty(1, columns) if residual is None else residual
    vector_kernel[(-(-columns // tile.columns),)](
        x,
        x if norm is None else norm,
        weight,
        weight if bias is None else bias,
        out,
        out,
        eps,
        NORM=norm is not None,
        BIAS=bias is not None,
        ADD=residual is not None,
        GATED=gated,
        COLUMNS=columns,
        DEPTH=depth,
        TILE_COLUMNS=tile.columns,
        TILE_DEPTH=tile.depth,
        EVEN=columns % tile.columns == 0 and depth % tile.depth == 0,
        num_warps=tile.num_warps,
    )
    return out
