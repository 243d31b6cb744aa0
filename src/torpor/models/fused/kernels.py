# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The kernels of ``ops``, in Triton. Imported only where Triton is.

Each program's arithmetic depends on its own row alone, so a row's bytes do not depend on how many others are in the batch.
Intermediate roundings are those of transformers' modules: a norm rounds before its weight, a sum with the residual once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    width,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. ADD: residual += x first, and the norm is of that sum."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row + columns, x, mask=inside)
    values = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = (values * scale).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + columns, (normed * weight).to(x.dtype), mask=inside)


# Arguments stand in lines by meaning: what, where, how.
# fmt: off
@triton.jit
def norm_rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, cache_ptr, slots_ptr,
    row_stride, stride_kv, stride_block, stride_slot, stride_head,
    q_heads, rotated_heads, heads, eps,
    NORM: tl.constexpr, STORE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):
    """One program per token and HEADS of its ``heads`` heads: query heads, then key heads, then with STORE value heads.

    head  [ a (HALF) | b (HALF) ]  ->  [ a cos - b sin | b cos + a sin ]      value heads stay as they are

    In place; with STORE keys and values go to the token's slot of the cache instead, if it has one.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    at = token * row_stride + head[:, None] * (2 * HALF) + lane[None, :]
    inside = (head < heads)[:, None] & (lane < HALF)[None, :]
    a = tl.load(qkv_ptr + at, mask=inside, other=0.0)
    b = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0)
    kind = a.dtype
    plain_a, plain_b = a, b
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        squares = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
        scale = tl.rsqrt(squares + eps)[:, None]
        is_query = (head < q_heads)[:, None]
        q_first, q_second = tl.load(q_weight_ptr + lane)[None, :], tl.load(q_weight_ptr + HALF + lane)[None, :]
        k_first, k_second = tl.load(k_weight_ptr + lane)[None, :], tl.load(k_weight_ptr + HALF + lane)[None, :]
        a = (a * scale).to(kind).to(tl.float32) * tl.where(is_query, q_first, k_first).to(tl.float32)
        b = (b * scale).to(kind).to(tl.float32) * tl.where(is_query, q_second, k_second).to(tl.float32)
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
    angle = token * (2 * HALF) + lane
    cos_a, cos_b = tl.load(cos_ptr + angle).to(tl.float32)[None, :], tl.load(cos_ptr + angle + HALF).to(tl.float32)[None, :]
    sin_a, sin_b = tl.load(sin_ptr + angle).to(tl.float32)[None, :], tl.load(sin_ptr + angle + HALF).to(tl.float32)[None, :]
    first, second = (a * cos_a - b * sin_a).to(kind), (b * cos_b + a * sin_b).to(kind)
    if STORE:
        slot = tl.load(slots_ptr + token)
        is_value = (head >= rotated_heads)[:, None]
        first, second = tl.where(is_value, plain_a, first), tl.where(is_value, plain_b, second)
        kv_head = head[:, None] - tl.where(is_value, rotated_heads, q_heads)
        place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot + tl.where(is_value, stride_kv, 0)
        target = cache_ptr + place + kv_head * stride_head + lane[None, :]
        kept = inside & (head >= q_heads)[:, None] & (slot >= 0)
        tl.store(target, first, mask=kept)
        tl.store(target + HALF, second, mask=kept)
        inside = inside & (head < q_heads)[:, None]
    tl.store(qkv_ptr + at, first, mask=inside)
    tl.store(qkv_ptr + at + HALF, second, mask=inside)
# fmt: on


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """One program per row and BLOCK columns: [gate | up] -> silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
    value = gate.to(tl.float32)
    activated = (value / (1.0 + tl.exp(-value))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    out_stride,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """x [rows, depth] @ weight [columns, depth].T + bias. Every element is one sum, front to back over depth by DEPTH."""
    # Programs that share a tile of the weights run together: GROUP row tiles, then the next column tile.
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    first_row_tile = (program // (GROUP * column_tiles)) * GROUP
    group = tl.minimum(row_tiles - first_row_tile, GROUP)
    within = program % (GROUP * column_tiles)
    row = ((first_row_tile + within % group) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((within // group) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inner = tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * depth + inner[None, :]
    weight_at = weight_ptr + column[None, :] * depth + inner[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + inner < depth
        x = tl.load(x_at + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=(column < columns)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    written = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], total.to(out_ptr.dtype.element_ty), mask=written)
