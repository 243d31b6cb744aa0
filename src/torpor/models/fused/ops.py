"""What a fused layer is made of besides its products. Triton on CUDA, plain torch elsewhere; equal up to rounding.

Shapes: T tokens, rows contiguous. All run on the current stream and block on nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

_HEADS = 8  # of one program: at one token there are still some programs, at thousands not too many
_COLUMNS = 1024  # of silu_mul, per program


@dataclass(frozen=True, slots=True)
class Store:
    """Where a step's keys and values go: a layer's cache [2, blocks, block_size, kv heads, head_dim], last stride 1, and a slot
    for each token, -1 for none."""

    cache: torch.Tensor
    slots: torch.Tensor


@functools.cache
def triton_kernels() -> Any:
    """The module of kernels, or None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from torpor.models.fused import kernels

    return kernels


def use_kernels(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and triton_kernels() is not None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, width] -> its norm."""
    if not use_kernels(x):
        return _rms_norm(x, weight, eps)
    return _launch_rms_norm(x, x, weight, eps, add=False)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x, in place -> the norm of the sum. All [T, width]."""
    if not use_kernels(x):
        return _rms_norm(residual.add_(x), weight, eps)
    return _launch_rms_norm(x, residual, weight, eps, add=True)


def norm_rotate(
    qkv: torch.Tensor,  # [T, (q_heads + 2 * kv_heads) * head_dim], changed in place: Q and K, not V
    cos: torch.Tensor,  # [T, head_dim]
    sin: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,  # weights [head_dim] of the norms of Q's and K's heads
    eps: float,
    store: Store | None = None,
) -> bool:
    """Norm Q's and K's heads, where the model does that, and rotate them by the tokens' positions.

    Returns whether K and V went to ``store``; then K in ``qkv`` is as it was.
    """
    head_dim = cos.shape[-1]
    if not use_kernels(qkv):
        _norm_rotate(qkv, cos, sin, q_heads, kv_heads, norms, eps)
        return False
    heads = q_heads + kv_heads * (1 if store is None else 2)
    q_weight, k_weight = (cos, cos) if norms is None else norms  # unused without norms
    cache, slots = (qkv, qkv) if store is None else (store.cache, store.slots)  # unused without a store
    strides, block_size = ((0,) * 4, 1) if store is None else (store.cache.stride()[:4], store.cache.shape[2])
    triton_kernels().norm_rotate_kernel[(len(qkv), -(-heads // _HEADS))](
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        cache,
        slots,
        qkv.stride(0),
        *strides,
        q_heads,
        q_heads + kv_heads,
        heads,
        eps,
        NORM=norms is not None,
        STORE=store is not None,
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        HALF=head_dim // 2,
        num_warps=4,
    )
    return store is not None


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * width], gate then up -> silu(gate) * up [T, width]."""
    width = gate_up.shape[1] // 2
    if not use_kernels(gate_up):
        gate, up = gate_up[:, :width], gate_up[:, width:]
        return torch.nn.functional.silu(gate) * up
    out = gate_up.new_empty(len(gate_up), width)
    triton_kernels().silu_mul_kernel[(len(gate_up), -(-width // _COLUMNS))](gate_up, out, width, BLOCK=_COLUMNS, num_warps=4)
    return out


def _launch_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, add: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    width = x.shape[1]
    block = 1 << (width - 1).bit_length()
    triton_kernels().rms_norm_kernel[(len(x),)](
        x,
        residual,
        weight,
        out,
        width,
        eps,
        ADD=add,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.to(torch.float32)
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (values * scale).to(x.dtype)


def _norm_rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    head_dim = cos.shape[-1]
    heads = qkv.view(len(qkv), -1, head_dim)
    parts = (heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads])
    for index, part in enumerate(parts):
        values = part if norms is None else _rms_norm(part, norms[index], eps)
        first, second = values.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        part.copy_(values * cos[:, None] + turned * sin[:, None])
