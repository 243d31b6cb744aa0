"""What KV is called by connectors that keep it: a block's name is a chained digest over the version of the weights, the layout,
the dtype, and all tokens up to the block's end. What is found under a name is right or is not there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b

from torpor.kvcache.prefix import HashChain
from torpor.kvcache.types import KVCacheSpec


def block_bytes_of(spec: KVCacheSpec) -> int:
    """Of one block: K and V of all layers."""
    return 2 * spec.num_layers * spec.block_bytes


def root_of(version: str, spec: KVCacheSpec) -> bytes:
    """Where names begin: other weights, another layout or another dtype give other names."""
    layout = [spec.num_layers, spec.block_size, spec.num_kv_heads, spec.head_dim, spec.dtype]
    told = json.dumps([version, *layout]).encode()
    return blake2b(told, digest_size=32, person=b"torpor kv keep 1").digest()


class Names:
    """Of the full blocks of texts, under one version of the weights at a time. ``of`` may be called by any thread, the others by
    the engine's."""

    def __init__(self, version: str, spec: KVCacheSpec) -> None:
        self._spec = spec
        self.root = root_of(version, spec)
        self._last: tuple[bytes, Sequence[int], list[bytes]] = (b"", (), [])  # root, tokens, names

    def use(self, version: str) -> None:
        """Names are those of these weights from now on."""
        self.root = root_of(version, self._spec)

    def of(self, token_ids: Sequence[int]) -> list[bytes]:
        """In the order of the blocks."""
        size = self._spec.block_size
        return list(HashChain().extend(self.root, token_ids, size, len(token_ids) // size))

    def asked(self, token_ids: Sequence[int]) -> list[bytes]:
        """``of``, for a text that is asked for again and again while its request waits."""
        root, tokens, names = self._last
        if root != self.root or tokens != token_ids:
            names = self.of(token_ids)
            self._last = (self.root, token_ids, names)
        return names
