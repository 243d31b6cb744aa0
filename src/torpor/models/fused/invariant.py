"""Linear layers whose rows do not depend on each other's company: a row's bytes are the same alone and among thousands.

Libraries choose a kernel, and with it the order of additions, by the number of rows. Here the order is always the same: front to
back over the depth, in steps of one size. Tiles differ between few rows and many; they decide which elements one program
computes, and not how an element is summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torpor.models.fused.ops import triton_kernels

_FEW_ROWS = 64
_DEPTH = 64
_FEW = {"ROWS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 5}
_MANY = {"ROWS": 128, "COLUMNS": 128, "num_warps": 8, "num_stages": 3}


@dataclass(frozen=True, slots=True)
class InvariantLinear:
    """On a GPU with Triton."""

    weight: torch.Tensor  # [columns, depth], contiguous
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, depth] -> [rows, columns]."""
        return linear(x, self.weight, self.bias, out, _FEW if len(x) <= _FEW_ROWS else _MANY)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, tile: dict[str, Any]
) -> torch.Tensor:
    rows, depth = x.shape
    columns = len(weight)
    x = x.contiguous()
    result = x.new_empty(rows, columns) if out is None else out
    programs = -(-rows // tile["ROWS"]) * -(-columns // tile["COLUMNS"])
    triton_kernels().linear_kernel[(programs,)](
        x,
        weight,
        weight if bias is None else bias,
        result,
        rows,
        columns,
        depth,
        result.stride(0),
        BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        DEPTH=_DEPTH if x.element_size() == 2 else _DEPTH // 2,
        GROUP=8,
        **tile,
    )
    return result
