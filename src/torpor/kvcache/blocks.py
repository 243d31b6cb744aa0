"""Who holds each block of the KV cache, and which free block is taken next. Knows nothing of content."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from torpor.errors import BugError, CapacityError
from torpor.kvcache.types import BlockId


class BlockPool:
    """Reference counts of ``num_blocks`` blocks and the order in which the free ones are taken. Every step of a block is O(1).

    A block is free exactly when its count is 0. Free blocks are taken from the front: first those whose content is worth
    nothing, then those whose content may be asked for again, the one unused for longest first. ``share`` revives a free block
    of that second kind.
    """

    def __init__(self, num_blocks: int) -> None:
        self._counts = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: BlockId) -> bool:
        return self._counts[block] == 0

    def can_take(self, count: int) -> bool:
        return count <= len(self._free)

    def take(self, count: int) -> list[BlockId]:
        """``count`` free blocks, each now held once. CapacityError takes none: ask ``can_take`` first."""
        if not self.can_take(count):
            raise CapacityError(f"{count} KV cache blocks needed, {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, block: BlockId) -> None:
        """One more holder. A free block is free no longer; its content is what it was."""
        if self._counts[block] == 0:
            del self._free[block]
        self._counts[block] += 1

    def release(self, block: BlockId, *, keep: bool) -> None:
        """One holder less. The last one frees the block: to the end of the order where its content is to be kept as long as
        possible, else to the front. BugError for a block nobody holds."""
        count = self._counts[block]
        if count <= 0:
            raise BugError(f"KV cache block {block} was freed twice: nobody holds it")
        self._counts[block] = count - 1
        if count == 1:
            self._free[block] = None
            if not keep:
                self._free.move_to_end(block, last=False)

    def check_integrity(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """BugError when the counts are not those of ``tables``, or the free blocks are not those with a count of 0."""
        held = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._counts):
            if held[BlockId(block)] != count:
                raise BugError(f"KV cache block {block}: its count is {count}, but {held[BlockId(block)]} tables hold it")
            if (BlockId(block) in self._free) != (count == 0):
                raise BugError(
                    f"KV cache block {block}: its count is {count}, but in the free list: {BlockId(block) in self._free}"
                )
        if len(self._free) > self.num_blocks or any(not 0 <= block < self.num_blocks for block in self._free):
            raise BugError(f"the free list names blocks outside 0..{self.num_blocks - 1}")
