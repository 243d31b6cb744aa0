"""Where pieces lie: stretches of chunks and their bytes, against their definitions."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torpor.memory.image import Image
from torpor.memory.layout import byte_runs, runs

flags = st.lists(st.booleans(), max_size=40)


@given(flags)
def test_runs_are_the_longest_stretches_of_set_flags(values: list[bool]) -> None:
    expected, start = [], 0
    for value, group in itertools.groupby(values):
        stop = start + len(list(group))
        expected += [(start, stop)] if value else []
        start = stop
    assert runs(np.array(values, dtype=np.bool_)) == expected


@given(flags.filter(len), st.integers(1, 8))
def test_the_last_chunk_of_a_range_counts_the_bytes_it_has(values: list[bool], last: int) -> None:
    chunk = 8
    nbytes = (len(values) - 1) * chunk + last
    mask = np.array(values, dtype=np.bool_)
    each = [chunk] * (len(values) - 1) + [last]
    expected = sum(size for size, value in zip(each, values, strict=True) if value)
    assert Image(0, nbytes, chunk).bytes_in(mask) == expected
    assert sum(size for _, size in byte_runs(mask, chunk, nbytes)) == expected
