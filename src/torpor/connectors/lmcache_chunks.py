"""How a block of the KV cache lies in a chunk of LMCache's memory, and how a chunk proves that it is whole and of that name.

A chunk is [2, layers, tokens, heads * head_dim], as LMCache has it. One that others write to, a remote or a peer, has one layer
more, in which its seal lies: LMCache checks nothing of what a remote gives back, and shows a peer's chunk before its bytes are
there (``docs/design/connectors.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    from torpor._native import Device

SEAL_BYTES = 16


class Chunks:
    """Between layers [2, blocks, block_size, heads, head_dim] and chunks. ``layers`` are the KV cache's own tensors."""

    def __init__(self, spec: KVCacheSpec, device: Device, *, sealed: bool) -> None:
        self._spec = spec
        self._device = device
        self._seal_bytes = min(SEAL_BYTES, spec.block_bytes) if sealed else 0
        self.layers = spec.num_layers + sealed
        self.shape = torch.Size([2, self.layers, spec.block_size, spec.num_kv_heads * spec.head_dim])
        self.dtype: torch.dtype = getattr(torch, spec.dtype)

    @property
    def nbytes(self) -> int:
        return 2 * self.layers * self._spec.block_bytes

    def fill(self, chunk: torch.Tensor, layers: Sequence[torch.Tensor], block: int, name: bytes) -> None:
        """The block's KV into the chunk, and its seal. Blocks until the KV cache is read."""
        for index, layer in enumerate(layers):
            chunk[:, index].copy_(layer[:, block].reshape(2, self._spec.block_size, -1))
        if self._seal_bytes:
            seal = torch.frombuffer(bytearray(self._seal_of(chunk, name)), dtype=torch.uint8)
            self._sealed_in(chunk).copy_(seal)

    def empty(self, chunk: torch.Tensor, layers: Sequence[torch.Tensor], block: int) -> None:
        """The chunk's KV into the block."""
        for index, layer in enumerate(layers):
            layer[:, block] = chunk[:, index].reshape(layer[:, block].shape).to(layer.device)

    def proves(self, chunk: torch.Tensor, name: bytes) -> bool:
        """Whether these are the bytes that were sealed under this name. Chunks without a seal are believed."""
        if not self._seal_bytes:
            return True
        found: bytes = self._sealed_in(chunk).cpu().numpy().tobytes()
        return found == self._seal_of(chunk, name)

    def _sealed_in(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk[1, -1].reshape(-1).view(torch.uint8)[: self._seal_bytes]

    def _seal_of(self, chunk: torch.Tensor, name: bytes) -> bytes:
        """Of the name and of the content's hashes, which are computed where the chunk lies."""
        told = blake2b(name, digest_size=self._seal_bytes, person=b"torpor kv seal 1")
        on_host = chunk.device.type == "cpu"
        if not on_host:  # what was asked of the device is done when others read
            self._device.synchronize()
        for half in (0, 1):
            content = chunk[half, :-1]
            nbytes = content.numel() * content.element_size()
            told.update(self._device.hash_chunks(content.data_ptr(), nbytes, -(-nbytes // 8) * 8, on_host=on_host).tobytes())
        return told.digest()
