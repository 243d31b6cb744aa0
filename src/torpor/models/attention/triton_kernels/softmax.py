# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""What the attention kernels share: one tile of keys, scored and added to a softmax that is carried along.

Everything is in powers of two: ``scale`` includes log2(e). A row's state is its maximum ``m``, the sum ``l`` of its weights and
the weighted sum ``acc`` of its values, both relative to ``m``. A row that saw nothing has m = -inf, l = 0, acc = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


def power_of_two(n: int) -> int:
    """At least ``n``. Triton's own costs several microseconds a call."""
    return 1 << (n - 1).bit_length()


@triton.jit
def load_tile(
    base,
    positions,
    visible,
    dims,
    table,
    stride_block,
    stride_slot,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Keys or values [positions, dims] of one kv head; with MASKED, zeros where not ``visible``. ``base`` points at the head's
    slot 0 of block 0."""
    if MASKED:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=visible, other=0)
        mask = visible[:, None] & (dims < HEAD_DIM)[None, :]
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE)
        mask = (dims < HEAD_DIM)[None, :]
    slots = blocks * stride_block + (positions % BLOCK_SIZE).to(tl.int64) * stride_slot
    return tl.load(base + slots[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def score(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """q [M, D], k [N, D] -> [M, N], in units of log2."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        doubled = tl.exp2(s * (2.0 / softcap) * scale)  # scale has log2(e) in it: exp(2x)
        return softcap * LOG2E * (1.0 - 2.0 / (doubled + 1.0))
    return s * scale


@triton.jit
def accumulate(s, v, m, l, acc, PRECISION: tl.constexpr):  # noqa: E741
    """Add a tile of scores [M, N], hidden ones -inf, and its values [N, D]."""
    new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - shift[:, None])
    keep = tl.exp2(m - shift)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return new, l * keep + tl.sum(p, 1), acc


@triton.jit
def normalised(l, acc):  # noqa: E741
    """Zeros for a row that saw nothing."""
    return acc / tl.where(l == 0.0, 1.0, l)[:, None]
