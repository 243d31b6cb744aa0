# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Storing a step's keys and values: one launch for both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torpor.models.attention.triton_kernels.softmax import power_of_two

_HEADS_PER_PROGRAM = 8


@triton.jit
def _write_kv(
    key,
    value,
    cache,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    stride_kv,
    stride_block,
    stride_slot,
    stride_head,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots + token)
    if slot < 0:
        return
    mask = (heads < KV_HEADS) & (dims < HEAD_DIM)
    k = tl.load(key + token * key_token + heads * key_head + dims, mask=mask)
    v = tl.load(value + token * value_token + heads * value_head + dims, mask=mask)
    target = cache + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot + heads * stride_head + dims
    tl.store(target, k, mask=mask)
    tl.store(target + stride_kv, v, mask=mask)


def write_kv(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """key and value [T, kv heads, head_dim] to their slots [T]; a slot of -1 writes nothing."""
    key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (key, value))
    tokens, kv_heads, head_dim = key.shape
    heads = min(_HEADS_PER_PROGRAM, power_of_two(kv_heads))
    _write_kv[(tokens, -(-kv_heads // heads))](
        key,
        value,
        kv_cache,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *kv_cache.stride()[:4],
        KV_HEADS=kv_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_two(head_dim),
        BLOCK_SIZE=kv_cache.shape[2],
        num_warps=4,
    )
