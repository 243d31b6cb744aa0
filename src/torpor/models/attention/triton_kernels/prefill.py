# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Attention of chunks of tokens over their paged contexts, causal: a program per tile of queries and kv head.

A tile holds some tokens of one sequence and all query heads of one kv head, so keys and values are read once for the group:

    row of the tile   0   1   2   3   4   5   6   7        GROUP = 4
    token             t0  t0  t0  t0  t1  t1  t1  t1
    head of the group 0   1   2   3   0   1   2   3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torpor.models.attention.triton_kernels.softmax import LOG2E, accumulate, load_tile, normalised, power_of_two, score


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiles:
    """Constants of the kernel, chosen by ``tuning``."""

    block_m: int  # rows of a tile: tokens x heads of a group
    block_n: int  # positions of a tile of keys
    num_warps: int
    num_stages: int  # as in ``DecodeTiles``

    def tokens(self, group: int) -> int:
        """Tokens of one tile of queries."""
        return max(1, self.block_m // group)


# Arguments stand in lines by meaning: what, where, how.
# fmt: off
@triton.jit
def _sweep(
    low, high, q, keys, values, table, query_positions, window, end, scale, softcap, m, l, acc,  # noqa: E741
    stride_block, stride_slot,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    """Tiles of keys from ``low``, a multiple of BLOCK_N, to ``high``; without MASKED every row sees all of them."""
    dims = tl.arange(0, BLOCK_D)
    for start in range(low, high, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        there = positions < end
        k = load_tile(keys, positions, there, dims, table, stride_block, stride_slot, MASKED, BLOCK_SIZE, HEAD_DIM)
        s = score(q, k, scale, softcap, SOFTCAP, PRECISION)
        if MASKED:
            visible = positions[None, :] <= query_positions[:, None]
            if WINDOW:
                visible &= positions[None, :] > query_positions[:, None] - window
            s = tl.where(visible, s, float("-inf"))
        v = load_tile(values, positions, there, dims, table, stride_block, stride_slot, MASKED, BLOCK_SIZE, HEAD_DIM)
        m, l, acc = accumulate(s, v, m, l, acc, PRECISION)  # noqa: E741
    return m, l, acc


@triton.jit
def _prefill(
    query, out, cache, tables, tiles,
    scale, softcap, window,
    query_token, query_head, out_token, table_row, stride_kv, stride_block, stride_slot, stride_head,
    DETERMINISTIC: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    kv_head, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    seq, first_token, count, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token, lane = rows // GROUP, rows % GROUP
    mask = (token < count)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens, heads = (first_token + token).to(tl.int64), kv_head * GROUP + lane
    q = tl.load(query + (tokens * query_token + heads * query_head)[:, None] + dims[None, :], mask=mask, other=0.0)
    keys = cache + kv_head * stride_head
    values = keys + stride_kv
    table = tables + seq.to(tl.int64) * table_row
    query_positions, end = first + token, first + count
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N if WINDOW else 0
    if not (WINDOW or DETERMINISTIC):
        # Up to the first query's own tile every row sees everything. A deterministic run leaves this loop out: the compiler
        # rounds differently in it, and which loop a tile of keys falls into depends on where the chunk began.
        low = (first + 1) // BLOCK_N * BLOCK_N
        m, l, acc = _sweep(  # noqa: E741
            0, low, q, keys, values, table, query_positions, window, end, scale, softcap, m, l, acc,
            stride_block, stride_slot,
            False, WINDOW, SOFTCAP, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE,
        )
    m, l, acc = _sweep(  # noqa: E741
        low, end, q, keys, values, table, query_positions, window, end, scale, softcap, m, l, acc,
        stride_block, stride_slot,
        True, WINDOW, SOFTCAP, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE,
    )
    where = out + (tokens * out_token + heads * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(where, normalised(l, acc).to(out.dtype.element_ty), mask=mask)
# fmt: on


def tiles_of(
    query_starts: Sequence[int], seq_lens: Sequence[int], rows: range, tokens: int, device: torch.device
) -> torch.Tensor:
    """[tiles, 4] int32 for the chunks ``rows`` of a batch: sequence, first token, how many, position of the first. Those with
    most to read come first: they take longest."""
    found = []
    for row in rows:
        begin, end = query_starts[row], query_starts[row + 1]
        offset = seq_lens[row] - end
        found += [(row, t, min(tokens, end - t), offset + t) for t in range(begin, end, tokens)]
    found.sort(key=lambda tile: -tile[3])
    return torch.tensor(found, dtype=torch.int32, device=device)


def single_tiles(seq_lens: torch.Tensor) -> torch.Tensor:
    """The tiles of a batch of single tokens, made on the device."""
    count = len(seq_lens)
    tiles = torch.ones(count, 4, dtype=torch.int32, device=seq_lens.device)
    tiles[:, :2] = torch.arange(count, dtype=torch.int32, device=seq_lens.device)[:, None]
    tiles[:, 3] = seq_lens - 1
    return tiles


def prefill(
    query: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    where: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    window: int | None,
    tiles: PrefillTiles,
    deterministic: bool,
) -> None:
    """query [T, heads, head_dim], last stride 1, and out, contiguous; ``where``: the tiles of queries to compute."""
    _, heads, head_dim = query.shape
    kv_heads = kv_cache.shape[3]
    group = heads // kv_heads
    _prefill[(kv_heads, len(where))](
        query,
        out,
        kv_cache,
        block_tables,
        where,
        scaling * LOG2E.value,
        softcap or 0.0,
        window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        block_tables.stride(0),
        *kv_cache.stride()[:4],
        DETERMINISTIC=deterministic,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        PRECISION="tf32x3",  # float32 in three passes of the tensor cores; other types have one way only
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, power_of_two(head_dim)),
        BLOCK_M=max(tiles.block_m, power_of_two(group)),
        BLOCK_N=tiles.block_n,
        BLOCK_SIZE=kv_cache.shape[2],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
