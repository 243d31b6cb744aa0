"""The kernels' constants, chosen by what was measured and not at serving time: a search would cost start-up time.

Measured on one H200 with Qwen3-8B's heads (32 over 8 of 128), bf16, blocks of 16, microseconds per layer in a captured step,
``benchmarks/gpu_attention.py --sweep``:

    block_n, num_warps, num_stages    1 x 192   1 x 2048   1 x 8192   8 x 1024   64 x 192   64 x 2048   256 x 192
    64, 2, 5   few programs               7.4       11.6       20.1       16.7       21.6         141        58.7
    64, 4, 3   many programs              7.4       13.8       28.9       20.7       17.7         144        57.5
    64, 2, 3                              7.9       13.7       22.0       18.1       19.0         145        57.3
    128, 4, 3                             6.9       12.0       28.5       20.0       22.7         142        64.3
    32, 4, 5                              7.9       13.0       26.1       20.5       18.0         149        60.1

With 2 waves instead of 16, 64 x 2048 takes 153; with shortest pieces of 128, 1 x 8192 takes 26.0, with 512 1 x 2048 takes 16.6.

Of chunks, only these constants in bf16 at head size 128 have been timed: 298 TFLOP/s for a prompt of 8192. Those of other head
sizes and of float32 are chosen so that 99 KB of shared memory a program are enough; they have been tested, not timed.
"""

from __future__ import annotations

import torch

from torpor.models.attention.triton_kernels.decode import DecodeTiles
from torpor.models.attention.triton_kernels.prefill import PrefillTiles


def decode_tiles(dtype: torch.dtype, head_dim: int, crowded: bool) -> DecodeTiles:
    """``crowded``: the sequences alone keep every multiprocessor busy, however short they are."""
    wide = head_dim > 128
    if dtype == torch.float32:
        return DecodeTiles(block_n=16 if wide else 32, num_warps=4, num_stages=3, waves=16, shortest=256)
    if wide or crowded:
        return DecodeTiles(block_n=64, num_warps=4, num_stages=3, waves=16, shortest=256)
    return DecodeTiles(block_n=64, num_warps=2, num_stages=5, waves=16, shortest=256)


def prefill_tiles(dtype: torch.dtype, head_dim: int) -> PrefillTiles:
    wide = head_dim > 128
    if dtype == torch.float32:
        return PrefillTiles(block_m=16 if wide else 32, block_n=32, num_warps=4, num_stages=1)
    if wide:
        return PrefillTiles(block_m=64, block_n=32, num_warps=8, num_stages=3)
    return PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)
