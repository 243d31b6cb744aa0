"""How a list of blocks is copied out of a mapped KV cache: in as few calls of the device as there can be.

One call copies the same blocks of many arrays, K and V of every layer. On an H200 a call of its own per layer would cost some
30 us each, 72 times for a model of 36 layers; a list of every block of every layer would take longer to write than to copy.
"""

from __future__ import annotations

from collections.abc import Iterator


def pieces(arrays: int, blocks: int, block_bytes: int, piece_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Which arrays and which of the blocks to copy in each call: of at most ``piece_bytes``, or one block. Every block of every
    array is in one of them."""
    most = max(1, piece_bytes // block_bytes)
    together = max(1, most // max(1, blocks))
    for array in range(0, arrays, together):
        for block in range(0, blocks, most):
            yield slice(array, array + together), slice(block, block + most)
