"""The KV cache manager: tables, prefix hits, eviction order, and E6: every index dies with the content."""

from __future__ import annotations

import dataclasses

import pytest

from torpor.errors import BugError, ConfigurationError, StateError
from torpor.kvcache import CacheConfig, KVCacheManager
from torpor.kvcache.prefix import HashChain


def compute(kv: KVCacheManager, name: str, tokens: list[int]) -> list[int]:
    """Allocate, compute and commit ``tokens`` as a request would. Returns the block table."""
    chain = HashChain()
    hit = kv.find_prefix(tokens, chain)
    assert kv.can_allocate(len(tokens), hit)
    table = kv.allocate(name, len(tokens), hit)
    kv.commit(name, tokens, len(tokens), chain)
    kv.check_integrity()
    return list(table)


def hit(kv: KVCacheManager, tokens: list[int]) -> int:
    return kv.find_prefix(tokens, HashChain()).num_tokens


def manager(num_blocks: int = 8, block_size: int = 4, caching: bool = True, version: str = "w1") -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, caching, version)


TEXT = list(range(12))


def test_what_one_request_computed_the_next_one_shares():
    kv = manager()
    first = compute(kv, "a", [*TEXT, 90])
    second = compute(kv, "b", [*TEXT, 91, 92])
    assert second[:3] == first[:3]
    assert second[3] != first[3]
    assert kv.stats().allocated_blocks == 5
    assert (kv.stats().prefix_queries, kv.stats().prefix_hits) == (27, 12)


@pytest.mark.parametrize(("length", "hits"), [(12, 8), (13, 12), (11, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)])
def test_a_whole_prompt_hit_leaves_a_token_to_compute(length, hits):
    kv = manager()
    compute(kv, "a", TEXT)
    assert hit(kv, [*TEXT, 99][:length]) == hits


def test_only_full_blocks_of_computed_tokens_are_hit():
    kv, chain = manager(), HashChain()
    kv.allocate("a", 12)
    for computed, hits in ((3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 12)):
        kv.commit("a", TEXT, computed, chain)
        assert hit(kv, [*TEXT, 99]) == hits


def test_freed_blocks_can_still_be_hit_until_they_are_taken():
    kv = manager()
    table = compute(kv, "a", TEXT)
    kv.free("a")
    assert kv.stats().free_blocks == 8
    assert compute(kv, "b", [*TEXT, 1])[:3] == table
    kv.check_integrity()


def test_the_least_recently_used_goes_first_and_the_end_of_a_text_before_its_beginning():
    kv = manager(num_blocks=4)
    compute(kv, "old", [1] * 8)
    compute(kv, "new", [2] * 8)
    kv.free("old")
    kv.free("new")
    kv.allocate("x", 4)  # takes the end of old
    assert (hit(kv, [1] * 9), hit(kv, [2] * 9)) == (4, 8)
    kv.allocate("y", 8)  # takes the rest of old and the end of new
    assert (hit(kv, [1] * 9), hit(kv, [2] * 9)) == (0, 4)
    assert kv.stats().evictions == 3
    kv.check_integrity()


def test_a_hit_makes_a_block_recently_used():
    kv = manager(num_blocks=4)
    compute(kv, "a", [1] * 4)
    compute(kv, "b", [2] * 4)
    kv.free("a")
    kv.free("b")
    compute(kv, "a", [1, 1, 1, 1, 5])
    kv.free("a")
    kv.allocate("x", 12)
    assert (hit(kv, [1] * 5), hit(kv, [2] * 5)) == (4, 0)


def test_can_allocate_counts_hits_that_lie_in_the_free_list():
    kv = manager(num_blocks=4)
    compute(kv, "a", TEXT)
    kv.free("a")
    found = kv.find_prefix([*TEXT, 1], HashChain())
    assert kv.can_allocate(16, found)
    assert not kv.can_allocate(17, found)
    assert not kv.can_allocate(16, found, reserve=1)
    kv.allocate("b", 16, found)
    assert kv.num_free == 0
    kv.check_integrity()


def test_can_allocate_needs_nothing_for_hits_that_are_held():
    kv = manager(num_blocks=4)
    compute(kv, "a", TEXT)
    found = kv.find_prefix([*TEXT, 1], HashChain())
    assert kv.can_allocate(16, found)
    assert not kv.can_allocate(17, found)


def test_the_second_block_with_the_same_content_stays_private():
    kv = manager()
    first, second = HashChain(), HashChain()
    one, two = kv.allocate("a", 12), kv.allocate("b", 12)
    kv.commit("a", TEXT, 8, first)
    kv.commit("b", TEXT, 12, second)  # two blocks are there already, the third is new
    kv.commit("a", TEXT, 12, first)
    kv.check_integrity()
    assert [kv.is_cached(block) for block in one] == [True, True, False]
    assert [kv.is_cached(block) for block in two] == [False, False, True]
    assert kv.find_prefix([*TEXT, 1], HashChain()).block_ids == (one[0], one[1], two[2])
    kv.free("b")
    kv.free("a")
    kv.check_integrity()
    assert kv.stats().free_blocks == 8


def test_growing_adds_a_block_only_when_the_last_one_is_full():
    kv = manager(num_blocks=3)
    table = kv.allocate("a", 3)
    kv.grow("a", 4)
    assert len(table) == 1
    kv.grow("a", 5)
    assert len(table) == 2
    assert kv.can_grow("a", 12)
    assert not kv.can_grow("a", 13)


def test_without_prefix_caching_nothing_is_ever_hit():
    kv = manager(caching=False)
    compute(kv, "a", TEXT)
    assert hit(kv, [*TEXT, 1]) == 0
    assert kv.stats().cached_blocks == 0
    assert kv.stats().prefix_queries == 0


def test_e6_a_reset_leaves_no_index_over_lost_content():
    kv = manager()
    compute(kv, "a", TEXT)
    kv.free("a")
    kv.reset()
    assert hit(kv, [*TEXT, 1]) == 0
    assert kv.stats().cached_blocks == 0
    assert kv.stats().free_blocks == 8
    kv.check_integrity()


def test_e6_kv_of_other_weights_never_matches():
    one, two = manager(version="w1"), manager(version="w2")
    chain = HashChain()
    one.find_prefix([*TEXT, 1], chain)
    names_before = list(chain.digests)
    two.find_prefix([*TEXT, 1], chain)
    assert not set(names_before) & set(chain.digests)
    one.reset("w2")
    other = HashChain()
    one.find_prefix([*TEXT, 1], other)
    assert other.digests == chain.digests


def test_e6_a_chain_from_before_new_weights_is_not_used_after_them():
    kv, chain = manager(), HashChain()
    kv.allocate("a", 12)
    kv.commit("a", TEXT, 12, chain)
    kv.free("a")
    kv.reset("w2")
    kv.allocate("a", 12)
    kv.commit("a", TEXT, 12, chain)
    assert hit(kv, [*TEXT, 1]) == 12  # found under the new weights' names


def test_e6_a_reset_while_blocks_are_held_is_refused_and_changes_nothing():
    kv = manager()
    compute(kv, "a", TEXT)
    with pytest.raises(StateError, match="1 requests hold blocks \\(a\\)"):
        kv.reset("w2")
    assert hit(kv, [*TEXT, 1]) == 12


def test_forgotten_blocks_are_not_hit_again_but_stay_with_those_who_share_them():
    kv = manager()
    table = compute(kv, "a", [*TEXT, 90])
    compute(kv, "b", [*TEXT, 91])
    kv.forget("a")
    kv.check_integrity()
    assert hit(kv, [*TEXT, 1]) == 0
    assert kv.table("b")[:3] == tuple(table[:3])
    kv.free("a")
    kv.free("b")
    kv.check_integrity()


def test_misuse_is_a_bug_and_says_what_happened():
    kv = manager(num_blocks=2)
    kv.allocate("a", 4)
    with pytest.raises(BugError, match="already has a block table"):
        kv.allocate("a", 4)
    with pytest.raises(BugError, match="without asking can_allocate"):
        kv.allocate("b", 8)
    kv.free("a")
    with pytest.raises(BugError, match="freed twice"):
        kv.free("a")
    kv.check_integrity()


def test_integrity_finds_a_table_that_may_write_to_a_cached_block():
    kv = manager()
    compute(kv, "a", TEXT)
    kv._committed["a"] = 2
    with pytest.raises(BugError, match="is in the prefix cache, but request 'a' may write to it"):
        kv.check_integrity()


def test_integrity_finds_a_block_lost_from_a_table():
    kv = manager()
    kv.allocate("a", 8).pop()
    with pytest.raises(BugError, match="its count is 1, but 0 tables hold it"):
        kv.check_integrity()


def test_stats_are_frozen_and_add_up():
    kv = manager()
    compute(kv, "a", TEXT)
    stats = kv.stats()
    assert stats.free_blocks + stats.allocated_blocks == stats.num_blocks == 8
    assert stats.cached_blocks == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.evictions = 1  # type: ignore[misc]


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_a_cache_of_nothing_is_a_configuration_error(sizes):
    with pytest.raises(ConfigurationError, match="must be 1 or more"):
        KVCacheManager(*sizes)


@pytest.mark.parametrize(
    "settings", [{"block_size": 0}, {"num_blocks": 0}, {"kv_cache_bytes": -1}, {"num_blocks": 1, "kv_cache_bytes": 1}]
)
def test_cache_settings_are_checked_at_the_door(settings):
    with pytest.raises(ConfigurationError):
        CacheConfig(**settings)
