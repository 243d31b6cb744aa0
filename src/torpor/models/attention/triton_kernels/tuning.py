"""The kernels' constants, chosen by what was measured and not at serving time: a search would cost start-up time."""

from __future__ import annotations

import torch

from torpor.models.attention.triton_kernels.decode import DecodeTiles
from torpor.models.attention.triton_kernels.prefill import PrefillTiles


def decode_tiles(dtype: torch.dtype, head_dim: int) -> DecodeTiles:
    wide = head_dim > 128
    if dtype == torch.float32:
        return DecodeTiles(block_n=16 if wide else 32, num_warps=4, num_stages=3, waves=16, shortest=256)
    return DecodeTiles(block_n=64, num_warps=4, num_stages=3, waves=16, shortest=256)


def prefill_tiles(dtype: torch.dtype, head_dim: int) -> PrefillTiles:
    wide = head_dim > 128
    if dtype == torch.float32:
        return PrefillTiles(block_m=16 if wide else 32, block_n=32, num_warps=4, num_stages=1)
    if wide:
        return PrefillTiles(block_m=64, block_n=32, num_warps=8, num_stages=3)
    return PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)
