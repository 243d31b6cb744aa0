from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheStats:
    """Blocks at this moment, and counts since the start. ``free_blocks`` + ``allocated_blocks`` is ``num_blocks``; cached
    blocks are counted whether free or allocated."""

    num_blocks: int
    block_size: int
    free_blocks: int
    allocated_blocks: int
    cached_blocks: int
    prefix_queries: int  # tokens for which the prefix cache was asked
    prefix_hits: int  # tokens of those that it had
    evictions: int  # cached blocks whose content gave way to another
    resets: int
