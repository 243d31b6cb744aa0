"""The prefix cache: names of blocks (E6: other weights, other names), and the index in both directions."""

from __future__ import annotations

import pytest

from torpor.errors import BugError
from torpor.kvcache.prefix import HashChain, PrefixIndex, root_digest


def names(tokens, root=b"r", size=2):
    return HashChain().extend(root, tokens, size, len(tokens) // size)


def test_equal_names_mean_an_equal_beginning():
    assert names([1, 2, 3, 4]) == names([1, 2, 3, 4])
    assert names([1, 2, 3, 4])[0] == names([1, 2, 9, 9])[0]
    assert names([1, 2, 3, 4])[1] != names([9, 9, 3, 4])[1]  # same block, other beginning


def test_a_name_depends_on_where_one_token_ends_and_the_next_begins():
    assert names([1, 256]) != names([256, 1])
    assert names([0, 1]) != names([1, 0])


def test_other_weights_other_names_e6():
    assert root_digest("model@1") != root_digest("model@2")
    assert not set(names([1, 2, 3, 4], root_digest("model@1"))) & set(names([1, 2, 3, 4], root_digest("model@2")))


def test_a_chain_grows_with_its_text_and_starts_over_at_a_new_root():
    chain = HashChain()
    first = list(chain.extend(b"a", [1, 2, 3], 2, 1))
    assert chain.extend(b"a", [1, 2, 3, 4], 2, 2)[:1] == first
    assert chain.extend(b"a", [1, 2, 3, 4], 2, 2) == names([1, 2, 3, 4], b"a")
    assert chain.extend(b"b", [1, 2, 3, 4], 2, 2) == names([1, 2, 3, 4], b"b")


def test_the_first_block_with_a_content_keeps_the_name():
    index = PrefixIndex()
    assert index.enter(b"x", 1)
    assert not index.enter(b"x", 2)
    assert index.find(b"x") == 1
    assert 2 not in index
    assert not index.drop(2)
    assert index.drop(1)
    assert index.find(b"x") is None
    index.check_integrity()


def test_a_block_with_two_names_is_a_bug():
    index = PrefixIndex()
    index.enter(b"x", 1)
    with pytest.raises(BugError, match="written to while cached"):
        index.enter(b"y", 1)


def test_integrity_looks_both_ways():
    forward, backward = PrefixIndex(), PrefixIndex()
    forward.enter(b"x", 1)
    del forward._name_of[1]
    backward.enter(b"x", 1)
    del backward._block_of[b"x"]
    for index in (forward, backward):
        with pytest.raises(BugError, match="prefix cache"):
            index.check_integrity()
