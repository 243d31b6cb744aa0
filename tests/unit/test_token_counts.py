"""What penalties know of a sequence, told token by token, against counting it all anew."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torpor.scheduler.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 200), max_size=300)


def told(counts: TokenCounts) -> dict[int, int]:
    ids, numbers = counts.seen()
    assert len(set(ids)) == len(ids), "a token twice would be penalised twice"
    return dict(zip(ids, numbers, strict=True))


@given(prompt=TOKENS, pieces=st.lists(TOKENS, max_size=4), asked=st.lists(st.booleans(), min_size=4, max_size=4))
def test_as_if_counted_anew_whenever_it_is_asked(prompt: list[int], pieces: list[list[int]], asked: list[bool]) -> None:
    outputs: list[int] = []
    counts = TokenCounts(prompt, outputs)
    for piece, ask in zip([[], *pieces], [*asked, True], strict=False):
        outputs.extend(piece)
        if ask:
            assert told(counts) == {**dict.fromkeys(prompt, 0), **Counter(outputs)}
    assert told(counts) == {**dict.fromkeys(prompt, 0), **Counter(outputs)}


def test_a_token_at_a_time() -> None:
    outputs: list[int] = []
    counts = TokenCounts([1_000_000], outputs)
    for token in [n // 2 for n in range(600)]:
        outputs.append(token)
        ids, numbers = counts.seen()
        assert sum(numbers) == len(outputs)
        assert len(ids) == 2 + token
    assert told(counts) == {1_000_000: 0, **dict.fromkeys(range(300), 2)}
