"""The prefix cache: which block holds the KV of which beginning of a text.

The name of a full block is a digest over the name of the block before it and its own tokens, so equal names mean that
everything up to the end of the block is equal. The chain starts at a name made from the weights' version: KV computed with
other weights never matches (E6).

    root(weights) -> digest(root, tokens 0..15) -> digest(that, tokens 16..31) -> ...
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from torpor.errors import BugError
from torpor.kvcache.types import BlockId

_DIGEST_BYTES = 32  # cryptographic and wide: clients choose the tokens, and a collision would show one client another's text
MAX_TOKEN_ID = 2**32 - 1  # token ids enter the digest as 4 bytes each


def root_digest(weights_version: str) -> bytes:
    return blake2b(weights_version.encode(), digest_size=_DIGEST_BYTES, person=b"torpor kv root").digest()


class HashChain:
    """The block names of one growing token list, each computed once. Belongs to whoever owns the list.

    The list may only grow. ``extend`` notices a new root (new weights) and starts over.
    """

    __slots__ = ("_root", "digests")

    def __init__(self) -> None:
        self._root = b""
        self.digests: list[bytes] = []

    def extend(self, root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int) -> list[bytes]:
        """The names of at least the first ``num_blocks`` blocks of ``tokens``, which must be full ones."""
        if root != self._root:
            self._root, self.digests = root, []
        digests = self.digests
        parent = digests[-1] if digests else root
        for index in range(len(digests), num_blocks):
            block = tokens[index * block_size : (index + 1) * block_size]
            parent = blake2b(parent + array("I", block).tobytes(), digest_size=_DIGEST_BYTES).digest()
            digests.append(parent)
        return digests


class PrefixIndex:
    """Names to blocks and blocks to names, one to one. A block that is entered must never be written to again until it is
    dropped."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, BlockId] = {}
        self._name_of: dict[BlockId, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._name_of

    def find(self, digest: bytes) -> BlockId | None:
        return self._block_of.get(digest)

    def enter(self, digest: bytes, block: BlockId) -> bool:
        """False when another block already has this content: the first one stays, the new one remains private to its holder."""
        if digest in self._block_of:
            return False
        if block in self._name_of:
            raise BugError(f"KV cache block {block} is to be entered under a second name: it was written to while cached")
        self._block_of[digest] = block
        self._name_of[block] = digest
        return True

    def drop(self, block: BlockId) -> bool:
        """Forget the block, because it is about to be written to. False when it was not in the index."""
        digest = self._name_of.pop(block, None)
        if digest is None:
            return False
        del self._block_of[digest]
        return True

    def clear(self) -> None:
        self._block_of.clear()
        self._name_of.clear()

    def check_integrity(self) -> None:
        """BugError when the two directions disagree."""
        for digest, block in self._block_of.items():
            if self._name_of.get(block) != digest:
                raise BugError(f"prefix cache: name {digest.hex()[:16]} leads to block {block}, whose own name is another")
        for block, digest in self._name_of.items():
            if self._block_of.get(digest) != block:
                raise BugError(f"prefix cache: block {block} has the name {digest.hex()[:16]}, which leads elsewhere")
