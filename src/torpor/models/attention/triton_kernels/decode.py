# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Attention of single tokens over their paged contexts: a program per piece of a context (``plan``) and kv head.

A program whose piece is all of its sequence writes the output. Otherwise it leaves its partial sums, and the last of the sequence
to arrive adds them up, in the order of the pieces: no second launch, and the same sums whoever comes last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torpor.models.attention.triton_kernels.plan import Plan
from torpor.models.attention.triton_kernels.softmax import LOG2E, accumulate, load_tile, normalised, power_of_two, score

_CHUNK = tl.constexpr(8)  # partial sums that are loaded at once; 16 took registers that cost a fourth program per processor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiles:
    """Constants of the kernel, chosen by ``tuning``."""

    block_n: int  # positions of one tile
    num_warps: int
    num_stages: int  # 1 + 2 for each tile that is loaded ahead: its blocks' ids come first
    waves: int  # whole pieces per multiprocessor that the plan aims at
    shortest: int  # positions of a whole piece at least


# Arguments stand in lines by meaning: what, where, how.
# fmt: off
@triton.jit
def _attend_piece(
    q, keys, values, table, begin, end, scale, softcap,
    stride_block, stride_slot,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        visible = (positions >= begin) & (positions < end)
        k = load_tile(keys, positions, visible, dims, table, stride_block, stride_slot, True, BLOCK_SIZE, HEAD_DIM)
        s = tl.where(visible[None, :], score(q, k, scale, softcap, SOFTCAP, PRECISION), float("-inf"))
        v = load_tile(values, positions, visible, dims, table, stride_block, stride_slot, True, BLOCK_SIZE, HEAD_DIM)
        m, l, acc = accumulate(s, v, m, l, acc, PRECISION)  # noqa: E741
    return m, l, acc


@triton.jit
def _merge(
    sums, maxima, weights, target, first, count, first_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Writes the sum of the pieces [first, first + count) of a sequence."""
    lanes, dims, chunk = tl.arange(0, LANES), tl.arange(0, BLOCK_D), tl.arange(0, _CHUNK)
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    m = tl.full([LANES], float("-inf"), tl.float32)
    l = tl.zeros([LANES], tl.float32)  # noqa: E741
    acc = tl.zeros([LANES, BLOCK_D], tl.float32)
    for i in range(0, count, _CHUNK):
        there = i + chunk < count
        rows = (first + i + chunk).to(tl.int64)[:, None] * HEADS + (first_head + lanes)[None, :]
        few = there[:, None] & (lanes < GROUP)[None, :]
        # .cg: past the L1, which other multiprocessors' stores do not reach
        some_m = tl.load(maxima + rows, mask=few, other=float("-inf"), cache_modifier=".cg")
        some_l = tl.load(weights + rows, mask=few, other=0.0, cache_modifier=".cg")
        where = rows[:, :, None] * HEAD_DIM + dims[None, None, :]
        some_acc = tl.load(sums + where, mask=there[:, None, None] & mask[None, :, :], other=0.0, cache_modifier=".cg")
        new = tl.maximum(m, tl.max(some_m, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        factor = tl.exp2(some_m - shift[None, :])
        keep = tl.exp2(m - shift)
        l = l * keep + tl.sum(some_l * factor, 0)  # noqa: E741
        acc = acc * keep[:, None] + tl.sum(some_acc * factor[:, :, None], 0)
        m = new
    merged = normalised(l, acc).to(target.dtype.element_ty)
    tl.store(target + lanes[:, None] * HEAD_DIM + dims[None, :], merged, mask=mask)


@triton.jit(do_not_specialize=["bound"])  # it changes from step to step: one kernel for all
def _decode(
    query, out, cache, tables, pieces, total, arrived, sums, maxima, weights,
    bound, scale, softcap,
    query_token, query_head, out_token, table_row, stride_kv, stride_block, stride_slot, stride_head,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    kv_head, piece = tl.program_id(0), tl.program_id(1)
    there = tl.load(total)
    pieces += piece
    seq, begin, end = tl.load(pieces).to(tl.int64), tl.load(pieces + bound), tl.load(pieces + 2 * bound)
    first, count = tl.load(pieces + 3 * bound), tl.load(pieces + 4 * bound)
    if piece >= there:  # after the loads: one wait for all of them
        return
    lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    first_head = kv_head * GROUP
    q_rows = query + seq * query_token + (first_head + lanes)[:, None] * query_head
    q = tl.load(q_rows + dims[None, :], mask=mask, other=0.0)
    keys = cache + kv_head * stride_head
    m, l, acc = _attend_piece(  # noqa: E741
        q, keys, keys + stride_kv, tables + seq * table_row, begin, end, scale, softcap,
        stride_block, stride_slot,
        SOFTCAP, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_SIZE,
    )
    target = out + seq * out_token + first_head * HEAD_DIM
    if count == 1:
        tl.store(target + lanes[:, None] * HEAD_DIM + dims[None, :], normalised(l, acc).to(out.dtype.element_ty), mask=mask)
    else:
        rows = piece.to(tl.int64) * (KV_HEADS * GROUP) + first_head + lanes
        tl.store(maxima + rows, m, mask=lanes < GROUP)
        tl.store(weights + rows, l, mask=lanes < GROUP)
        tl.store(sums + rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.debug_barrier()  # all of the program has stored before its one atomic says so
        counter = arrived + seq * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
            tl.store(counter, 0)
            _merge(
                sums, maxima, weights, target, first, count, first_head,
                KV_HEADS * GROUP, GROUP, LANES, HEAD_DIM, BLOCK_D,
            )
# fmt: on


def partial_sums(plan: Plan, heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Room for what the pieces of ``plan`` leave: sums [P, heads, head_dim], maxima and weights [P, heads]. Layers share it."""
    rows, device = plan.pieces.shape[1] * heads, plan.pieces.device
    return tuple(torch.empty(size, dtype=torch.float32, device=device) for size in (rows * head_dim, rows, rows))


def decode(
    query: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: Plan,
    partials: tuple[torch.Tensor, ...],
    *,
    scaling: float,
    softcap: float | None,
    tiles: DecodeTiles,
) -> None:
    """query [S, heads, head_dim], last stride 1, and out, contiguous: one token per sequence of ``plan``."""
    _, heads, head_dim = query.shape
    kv_heads = kv_cache.shape[3]
    group = heads // kv_heads
    bound = plan.pieces.shape[1]
    _decode[(kv_heads, bound)](
        query,
        out,
        kv_cache,
        block_tables,
        plan.pieces,
        plan.total,
        plan.arrived,
        *partials,
        bound,
        scaling * LOG2E.value,
        softcap or 0.0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        block_tables.stride(0),
        *kv_cache.stride()[:4],
        SOFTCAP=softcap is not None,
        PRECISION="tf32x3",  # float32 in three passes of the tensor cores; other types have one way only
        KV_HEADS=kv_heads,
        GROUP=group,
        LANES=power_of_two(group),
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, power_of_two(head_dim)),
        BLOCK_M=max(16, power_of_two(group)),
        BLOCK_N=tiles.block_n,
        BLOCK_SIZE=kv_cache.shape[2],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
