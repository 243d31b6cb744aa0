"""The KV cache's tensors, in pool ``kv_cache``. The only module of this package that needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    from torpor.memory import Memory

KV_CACHE_TAG = "kv_cache"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def allocate_kv_caches(
    spec: KVCacheSpec, memory: Memory, *, exportable: bool = False, guarded: bool = True
) -> dict[str, torch.Tensor]:
    """One tensor [2, num_blocks, block_size, num_kv_heads, head_dim] per layer under ``layers.<i>``; content is undefined.

    ``exportable``: physical memory that other processes can map; while asleep its range reads as zeros instead of faulting (P4),
    unless ``guarded`` is switched off.
    DeviceMemoryError when the device has not enough.
    """
    pool = memory.pool(KV_CACHE_TAG, policy="discard", exportable=exportable, guarded=exportable and guarded)
    pool.reserve(spec.layer_bytes * spec.num_layers + 256 * spec.num_layers)  # tensors are aligned to 256 bytes
    shape = (2, spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    return {f"layers.{i}": pool.empty(shape, _DTYPES[spec.dtype]) for i in range(spec.num_layers)}
