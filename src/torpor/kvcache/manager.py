"""The KV cache as the scheduler sees it: a block table per request, over a pool of blocks with a prefix cache.

A block is in one of four conditions:

    free, empty      nobody holds it, its content is worth nothing
    free, cached     nobody holds it; the prefix cache can revive it until it is taken, the least recently used one first
    held, private    in one table; the only condition in which a block is written to
    held, cached     in one or more tables; full, and never written to

What turns private into cached is ``commit``, which its caller calls for positions whose KV is computed, or has arrived from a
peer and was confirmed. What lies before a committed position is not written again, so no cached block is ever written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torpor.errors import BugError, ConfigurationError, StateError
from torpor.kvcache.blocks import BlockPool
from torpor.kvcache.prefix import HashChain, PrefixIndex, root_digest
from torpor.kvcache.stats import KVCacheStats
from torpor.kvcache.types import BlockId


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks of a text's beginning, in order. Good until the next change of the cache."""

    block_ids: tuple[BlockId, ...] = ()
    num_tokens: int = 0


NO_HIT = PrefixHit()


class KVCacheManager:
    """Block tables by request id. No tensors: block ids only. Not thread-safe; belongs to the engine's loop thread.

    ``weights_version`` names the weights the KV is computed with; it seeds the prefix cache.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, weights_version: str = "") -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigurationError(
                f"num_blocks is {num_blocks} and block_size {block_size}: both must be 1 or more",
                setting="num_blocks" if num_blocks < 1 else "block_size",
                value=num_blocks if num_blocks < 1 else block_size,
            )
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()
        self._root = root_digest(weights_version)
        self._tables: dict[str, list[BlockId]] = {}
        self._committed: dict[str, int] = {}  # leading blocks of a table that need not be looked at by commit again
        self._queries = self._hits = self._evictions = self._resets = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return self._pool.num_free

    @property
    def capacity_tokens(self) -> int:
        return self._pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def request_ids(self) -> set[str]:
        """Who has a table."""
        return set(self._tables)

    # Predicates

    def find_prefix(self, tokens: Sequence[int], chain: HashChain) -> PrefixHit:
        """The longest cached beginning of ``tokens``, in full blocks. Changes and counts nothing but ``chain``.

        The last token is never part of it: its logits are wanted, and they come from computing it.
        """
        if not self.enable_prefix_caching:
            return NO_HIT
        limit = (len(tokens) - 1) // self.block_size
        blocks: list[BlockId] = []
        for digest in chain.extend(self._root, tokens, self.block_size, limit)[:limit]:
            block = self._index.find(digest)
            if block is None:
                break
            blocks.append(block)
        return PrefixHit(tuple(blocks), len(blocks) * self.block_size)

    def can_allocate(self, num_tokens: int, hit: PrefixHit = NO_HIT, reserve: int = 0) -> bool:
        """Whether a table of ``num_tokens`` that begins with ``hit`` leaves at least ``reserve`` blocks free."""
        revived = sum(self._pool.is_free(block) for block in hit.block_ids)
        return self._pool.can_take(self.blocks_for(num_tokens) - len(hit.block_ids) + revived + reserve)

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        return self._pool.can_take(self.blocks_for(num_tokens) - len(self._table(request_id)))

    # Actions

    def allocate(self, request_id: str, num_tokens: int, hit: PrefixHit = NO_HIT) -> list[BlockId]:
        """A table for ``num_tokens`` that begins with the blocks of ``hit``. Returns the table itself: it grows with ``grow``,
        and is not to be changed. Ask ``can_allocate`` first; BugError when the request already has a table."""
        if request_id in self._tables:
            raise BugError(f"request {request_id!r} already has a block table")
        if not self.can_allocate(num_tokens, hit):
            raise BugError(f"request {request_id!r} was given {num_tokens} tokens of KV cache without asking can_allocate")
        for block in hit.block_ids:
            self._pool.share(block)
        table = [*hit.block_ids, *self._take(self.blocks_for(num_tokens) - len(hit.block_ids))]
        self._tables[request_id] = table
        self._committed[request_id] = len(hit.block_ids)
        self._queries += num_tokens if self.enable_prefix_caching else 0
        self._hits += hit.num_tokens
        return table

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Make the table long enough for ``num_tokens``. Ask ``can_grow`` first."""
        table = self._table(request_id)
        table.extend(self._take(max(0, self.blocks_for(num_tokens) - len(table))))

    def commit(self, request_id: str, tokens: Sequence[int], num_computed: int, chain: HashChain) -> None:
        """The KV of the first ``num_computed`` tokens is in the table's blocks and will not be written again: enter the full
        blocks among them in the prefix cache. ``chain`` must be of ``tokens``. Where another block already has the same
        content, that one stays."""
        full = num_computed // self.block_size
        done = self._committed[request_id]
        if full <= done or not self.enable_prefix_caching:
            return
        table = self._table(request_id)
        digests = chain.extend(self._root, tokens, self.block_size, full)
        for index in range(done, full):
            self._index.enter(digests[index], table[index])
        self._committed[request_id] = full

    def free(self, request_id: str) -> None:
        """The request gives its blocks back. Its cached blocks can still be hit; the end of the text is evicted before its
        beginning. BugError when it has none (freed twice)."""
        table = self._table(request_id)
        del self._tables[request_id], self._committed[request_id]
        for block in reversed(table):
            self._pool.release(block, keep=block in self._index)

    def forget(self, request_id: str) -> None:
        """The KV of the request is not to be trusted: nobody hits its blocks any more. Those who share them keep them."""
        for block in self._table(request_id):
            self._index.drop(block)

    def reset(self, weights_version: str | None = None) -> None:
        """The content of every block is gone: so is every index over it, in the same step (E6). With ``weights_version``, KV is
        computed with those weights from now on. StateError while any request has a table."""
        if self._tables:
            names = ", ".join(sorted(self._tables)[:5])
            raise StateError(
                f"the KV cache is reset while {len(self._tables)} requests hold blocks ({names}):"
                " abort or freeze them and end hand-offs first",
                state="allocated",
            )
        if weights_version is not None:
            self._root = root_digest(weights_version)
        # Without tables every block is free, and which is taken first matters no more: a new pool of 30,000 takes 14 ms, in every
        # sleep and in every wake.
        self._index.clear()
        self._resets += 1

    def table(self, request_id: str) -> tuple[BlockId, ...]:
        """A copy of the request's block table."""
        return tuple(self._table(request_id))

    def is_cached(self, block: BlockId) -> bool:
        """Whether the block is in the prefix cache: nobody may write to it."""
        return block in self._index

    def stats(self) -> KVCacheStats:
        return KVCacheStats(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=self._pool.num_free,
            allocated_blocks=self.num_blocks - self._pool.num_free,
            cached_blocks=len(self._index),
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            evictions=self._evictions,
            resets=self._resets,
        )

    def check_integrity(self) -> None:
        """BugError saying what disagrees: counts and tables, the free list, the prefix cache in both directions. O(blocks)."""
        self._pool.check_integrity(self._tables.values())
        self._index.check_integrity()
        if self._tables.keys() != self._committed.keys():
            raise BugError(f"tables and committed counts disagree on {sorted(self._tables.keys() ^ self._committed.keys())}")
        writers: dict[BlockId, str] = {}
        for request_id, table in self._tables.items():
            if len(set(table)) != len(table):
                raise BugError(f"the block table of request {request_id!r} names a block twice: {table}")
            for block in table[self._committed[request_id] :]:
                if block in self._index:
                    raise BugError(f"block {block} is in the prefix cache, but request {request_id!r} may write to it")
                if block in writers:
                    raise BugError(f"requests {request_id!r} and {writers[block]!r} may both write to block {block}")
                writers[block] = request_id

    def _table(self, request_id: str) -> list[BlockId]:
        table = self._tables.get(request_id)
        if table is None:
            raise BugError(f"request {request_id!r} holds no KV cache blocks: freed twice, or never allocated")
        return table

    def _take(self, count: int) -> list[BlockId]:
        taken = self._pool.take(count)
        for block in taken:
            self._evictions += self._index.drop(block)
        return taken
