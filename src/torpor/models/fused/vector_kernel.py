# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The product of one token with a matrix, in Triton, with what a decoder layer does before and after it. See ``vector``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(weight_ptr, column, inner, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """weight [columns, inner]; each weight is read once, by one program, and never again in this step."""
    at = weight_ptr + column.to(tl.int64)[:, None] * DEPTH + inner[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    inside = (column < COLUMNS)[:, None] & (inner < DEPTH)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(x_ptr, inner, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_ptr + inner)
    return tl.load(x_ptr + inner, mask=inner < DEPTH, other=0.0)


# Arguments stand in lines by meaning: what, where, how.
# fmt: off
@triton.jit
def vector_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One program per TILE_COLUMNS of out [COLUMNS].

    NORM: x is normed first, by every program for itself; TILE_DEPTH covers DEPTH then.
    ADD: residual [COLUMNS] is added and gets the sum. GATED: weight is [gate | up], out silu(gate) * up.
    """
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inner = tl.arange(0, TILE_DEPTH)
    weight = _tile(weight_ptr, column, inner, COLUMNS, DEPTH, EVEN)
    if GATED:
        up_ptr = weight_ptr + COLUMNS * DEPTH
        up_weight = _tile(up_ptr, column, inner, COLUMNS, DEPTH, EVEN)
    if NORM:
        norm = _vector(norm_ptr, inner, DEPTH, EVEN).to(tl.float32)
    x = _vector(x_ptr, inner, DEPTH, EVEN)
    kind = x.dtype
    if NORM:
        values = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / DEPTH + eps)
        x = ((values * scale).to(kind).to(tl.float32) * norm).to(kind)
    total = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    if GATED:
        up_total = up_weight.to(tl.float32) * x.to(tl.float32)[None, :]
    for start in tl.static_range(TILE_DEPTH, DEPTH, TILE_DEPTH):
        x = _vector(x_ptr, start + inner, DEPTH, EVEN).to(tl.float32)
        total += _tile(weight_ptr, column, start + inner, COLUMNS, DEPTH, EVEN).to(tl.float32) * x[None, :]
        if GATED:
            up_total += _tile(up_ptr, column, start + inner, COLUMNS, DEPTH, EVEN).to(tl.float32) * x[None, :]
    inside = column < COLUMNS
    y = tl.sum(total, axis=1)
    if BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = y.to(kind).to(tl.float32)
    if GATED:
        up = tl.sum(up_total, axis=1)
        if BIAS:
            up += tl.load(bias_ptr + COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
        activated = (y / (1.0 + tl.exp(-y))).to(kind).to(tl.float32)
        y = activated * up.to(kind).to(tl.float32)
    if ADD:
        y += tl.load(residual_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + column, y.to(kind), mask=inside)
    else:
        tl.store(out_ptr + column, y.to(kind), mask=inside)
# fmt: on
