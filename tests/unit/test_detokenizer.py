"""Text as it comes: never half a character, never text that may become a stop string, and in the end exactly the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor.engine.detokenizer import MAX_PENDING, IncrementalDecoder, StopMatcher

REPLACEMENT = "�"


def utf8(ids: Sequence[int]) -> str:
    """A token is a byte; an incomplete sequence decodes to U+FFFD, as in byte-level vocabularies."""
    return bytes(ids).decode("utf-8", errors="replace")


def pieces(table: dict[int, str]):  # type: ignore[no-untyped-def]
    """A sentencepiece-like decoder: the space before the very first word is dropped."""
    return lambda ids: "".join(table[i] for i in ids).removeprefix(" ")


def byte_fallback(ids: Sequence[int]) -> str:
    """A token is a byte, as where sentencepiece falls back to bytes: one wrong byte spoils all those beside it."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(ids)


def run(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@given(st.text(max_size=80))
def test_the_parts_make_up_the_text_and_no_part_is_half_a_character(text: str) -> None:
    parts = run(IncrementalDecoder(utf8), text.encode())
    assert "".join(parts) == text
    assert REPLACEMENT in text or all(REPLACEMENT not in part for part in parts)


@given(st.text(max_size=30), st.text(max_size=60))
def test_an_answer_reads_on_from_its_prompt(prompt: str, text: str) -> None:
    decoder = IncrementalDecoder(utf8, list(prompt.encode()))
    assert "".join(run(decoder, text.encode())) == text


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_come_out_too(ids: list[int]) -> None:
    parts = run(IncrementalDecoder(utf8), ids)
    assert "".join(parts).replace(REPLACEMENT, "") == utf8(ids).replace(REPLACEMENT, "")


def test_a_character_of_four_tokens_comes_at_once() -> None:
    assert run(IncrementalDecoder(utf8), "🦙!".encode()) == ["", "", "", "🦙", "!", ""]


def test_half_a_character_at_the_end_is_shown_as_broken() -> None:
    assert run(IncrementalDecoder(utf8), "é".encode()[:1]) == ["", REPLACEMENT]


def test_endless_nonsense_is_not_held_back_for_ever() -> None:
    decoder = IncrementalDecoder(utf8)
    assert any(decoder.push(0xFF) for _ in range(MAX_PENDING + 2))


def test_a_character_begun_by_the_prompt_is_finished_by_the_answer() -> None:
    prompt, rest = list("é".encode()[:1]), "é".encode()[1:]
    assert "".join(run(IncrementalDecoder(utf8, prompt), rest)) == "é"


@given(st.text(alphabet="aé世🙂", max_size=8), st.text(alphabet="aé世🙂", max_size=8))
def test_the_tail_of_a_prompt_begins_with_a_whole_character(prompt: str, text: str) -> None:
    decoder = IncrementalDecoder(byte_fallback, list(prompt.encode()))
    assert "".join(run(decoder, text.encode())) == text


def test_the_space_before_the_first_word_of_an_answer_stays() -> None:
    decode = pieces({0: " Hello", 1: " world", 2: "!"})
    assert run(IncrementalDecoder(decode, [0]), [1, 2]) == [" world", "!", ""]
    assert run(IncrementalDecoder(decode), [1, 2]) == ["world", "!", ""]


@pytest.mark.parametrize("silent", [*range(1, 30), 1000])
def test_the_space_of_an_answer_stays_behind_a_prompt_that_ends_in_special_tokens(silent: int) -> None:
    """A chat template may end in many; each of them is decoded a few times, not once for every other."""
    decoded = [0]
    table = pieces({0: " word", 1: "", 2: " next"})

    def decode(ids: Sequence[int]) -> str:
        decoded[0] += len(ids)
        return table(ids)

    decoder = IncrementalDecoder(decode, [0] * 20 + [1] * silent)
    assert decoded[0] < 4 * silent + 40
    assert run(decoder, [2, 1, 0]) == [" next", "", " word", ""]
    assert run(IncrementalDecoder(decode, [1] * silent), [2, 0]) == ["next", " word", ""]


@pytest.mark.parametrize("silent", [1, 2, 40])
@pytest.mark.parametrize("before", range(15, 60))
def test_the_space_behind_a_special_token_that_is_skipped_stays(before: int, silent: int) -> None:
    """Wherever the window is cut; and a model that says nothing but special tokens does not make it grow."""
    longest = [0]
    table = pieces({0: " word", 1: "", 2: " next"})

    def decode(ids: Sequence[int]) -> str:
        longest[0] = max(longest[0], len(ids))
        return table(ids)

    parts = run(IncrementalDecoder(decode, [0]), [0] * before + [1] * silent + [2])
    assert "".join(parts) == " word" * before + " next"
    assert longest[0] < 40


def test_a_long_text_is_decoded_in_a_short_window() -> None:
    longest = [0]

    def decode(ids: Sequence[int]) -> str:
        longest[0] = max(longest[0], len(ids))
        return utf8(ids)

    text = "the quick brown fox — " * 40
    assert "".join(run(IncrementalDecoder(decode), text.encode())) == text
    assert longest[0] < 40


@pytest.mark.parametrize(
    ("stops", "texts", "shown", "matched"),
    [
        (["END"], ["ab", "EN", "D", "x"], ["ab", "", "", ""], "END"),
        (["END"], ["abE", "Nx"], ["ab", "ENx"], None),
        (["b", "abc"], ["xab"], ["xa"], "b"),
        (["bcd", "b"], ["abcd"], ["a"], "bcd"),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
    ],
)
def test_stop_strings(stops: list[str], texts: list[str], shown: list[str], matched: str | None) -> None:
    matcher = StopMatcher(stops)
    out = ["" if matcher.matched else matcher.push(text) for text in texts]
    assert (out, matcher.matched) == (shown, matched)


def test_a_stop_string_can_be_shown() -> None:
    matcher = StopMatcher(["END"], include_in_output=True)
    assert matcher.push("abENDcd") == "abEND"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert (matcher.push("abEN"), matcher.flush()) == ("ab", "EN")


def test_text_before_min_tokens_does_not_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.skip("xEND") == "xEND"
    assert (matcher.push("yE"), matcher.matched) == ("y", None)


@given(
    st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_stop_strings_find_what_a_search_of_the_whole_text_finds(texts: list[str], stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for text in texts:
        if matcher.matched is None:
            out += matcher.push(text)
    whole = "".join(texts)
    ends = [at + len(stop) for stop in stops if (at := whole.find(stop)) >= 0]
    if not ends:
        assert (out + matcher.flush(), matcher.matched) == (whole, None)
    else:
        assert matcher.matched in stops
        assert whole.startswith(out + (matcher.matched or ""))
        assert not any(stop in out for stop in stops)
