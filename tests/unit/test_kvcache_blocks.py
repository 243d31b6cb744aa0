"""The block pool: counts, the order of the free list, and what it says when it is used wrongly."""

from __future__ import annotations

import pytest

from torpor.errors import BugError, CapacityError
from torpor.kvcache.blocks import BlockPool


def test_blocks_are_taken_in_the_order_in_which_they_became_free():
    pool = BlockPool(4)
    assert pool.take(4) == [0, 1, 2, 3]
    for block in (2, 0, 3, 1):
        pool.release(block, keep=True)
    assert pool.take(4) == [2, 0, 3, 1]


def test_blocks_without_content_are_taken_before_those_worth_keeping():
    pool = BlockPool(3)
    pool.take(3)
    pool.release(0, keep=True)
    pool.release(1, keep=False)
    pool.release(2, keep=True)
    assert pool.take(3) == [1, 0, 2]


def test_a_shared_block_is_free_only_when_its_last_holder_let_go():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.share(block)
    pool.release(block, keep=True)
    assert not pool.can_take(1)
    pool.release(block, keep=True)
    assert pool.can_take(1)


def test_sharing_a_free_block_revives_it():
    pool = BlockPool(2)
    pool.take(2)
    pool.release(0, keep=True)
    pool.release(1, keep=True)
    pool.share(0)
    assert pool.take(1) == [1]
    pool.check_integrity([[0], [1]])


def test_taking_too_much_takes_nothing():
    pool = BlockPool(2)
    with pytest.raises(CapacityError, match="3 KV cache blocks needed, 2 of 2 are free"):
        pool.take(3)
    assert pool.num_free == 2


def test_a_double_free_is_a_bug():
    pool = BlockPool(2)
    pool.take(1)
    pool.release(0, keep=False)
    with pytest.raises(BugError, match="block 0 was freed twice"):
        pool.release(0, keep=False)
    pool.check_integrity([])


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[1]]])
def test_integrity_names_the_block_whose_count_is_wrong(tables):
    pool = BlockPool(2)
    pool.take(1)
    pool.check_integrity([[0]])
    with pytest.raises(BugError, match=r"KV cache block [01]: its count is"):
        pool.check_integrity(tables)


def test_integrity_sees_a_held_block_in_the_free_list():
    pool = BlockPool(2)
    pool.take(1)
    pool._free[0] = None
    with pytest.raises(BugError, match="in the free list: True"):
        pool.check_integrity([[0]])
