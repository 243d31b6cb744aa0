"""Words every layer above shares: block ids, epochs, and how the KV cache lies in memory."""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)  # index of a block in the KV cache; 0 is a valid block


@dataclass(frozen=True, slots=True)
class Epoch:
    """The identity of one mapping of the KV cache (P1). Only equality means anything: there is no order between epochs.

    ``boot`` is 16 random hex digits per process start; ``counter`` goes up by one with every new mapping.
    """

    boot: str
    counter: int

    @classmethod
    def first(cls) -> Epoch:
        return cls(secrets.token_hex(8), 1)

    def next(self) -> Epoch:
        return Epoch(self.boot, self.counter + 1)

    def __str__(self) -> str:
        return f"{self.boot}.{self.counter}"

    @classmethod
    @functools.lru_cache(maxsize=64)  # every load of a peer names the same one
    def parse(cls, text: str) -> Epoch:
        """ValueError for anything ``str`` did not make."""
        boot, _, counter = text.partition(".")
        if len(boot) != 16 or not counter.isdigit() or len(counter) > 19:
            raise ValueError(f"not an epoch: {text!r}")
        int(boot, 16)
        return cls(boot, int(counter))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of the KV cache, equal on both sides of a transfer.

    Each layer is one tensor [2, num_blocks, block_size, num_kv_heads, head_dim] (0 is K, 1 is V), contiguous, so a block of one
    layer is two spans of ``block_bytes`` each. ``num_blocks`` may differ between peers, the rest may not.
    """

    model_id: str  # identity of the weights: name and content version
    num_layers: int
    num_blocks: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32", "bfloat16", "float16"

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def block_bytes(self) -> int:
        """Bytes of K (or of V) of one block of one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def layer_bytes(self) -> int:
        return 2 * self.num_blocks * self.block_bytes
