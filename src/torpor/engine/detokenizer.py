"""Tokens to text as they come: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "�"  # what an incomplete UTF-8 sequence decodes to
PROMPT_TAIL = 6  # prompt tokens that decide how the first generated token reads (leading spaces, a split character)
MAX_WINDOW = 24  # tokens decoded at a time before the window is cut at a character boundary
MAX_PENDING = 8  # tokens that end in no character: more than four cannot be one character, so the text really is broken
KEEP_PENDING = 3  # of those, the ones that may yet become a character

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """``push`` a token, get the text it adds. Decodes a short window, because how a token reads depends on those before it."""

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = _tail(decode, prompt_token_ids)
        self._boundary = len(self._window)  # tokens of the window whose text is out
        # A prompt that ends inside a character: its first part shows as part of the answer, once it is whole.
        self._shown = len(self._text().rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._text()
        if not text.endswith(REPLACEMENT):
            return self._show(text, len(self._window))
        if len(self._window) - self._boundary <= MAX_PENDING:
            return ""
        cut = len(self._window) - KEEP_PENDING
        return self._show(self._decode(self._window[:cut]), cut)

    def flush(self) -> str:
        """The rest, at the end of the text: half a character shows as U+FFFD."""
        return self._show(self._text(), len(self._window))

    def _text(self) -> str:
        return self._decode(self._window) if self._window else ""

    def _show(self, text: str, boundary: int) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        if len(self._window) > MAX_WINDOW and self._boundary < boundary:
            boundary = self._cut(boundary)
        self._boundary = boundary
        return new

    def _cut(self, boundary: int) -> int:
        """Forget all but the newest text that is out, what is not out yet, and its boundary, which is returned anew."""
        newest = self._window[self._boundary : boundary]
        if text := self._decode(newest):
            self._window = self._window[self._boundary :]
        else:  # special tokens that are skipped: behind them alone, the next word would be the first of a text and lose its space
            newest = self._window[: self._boundary]
            self._window = newest + self._window[boundary:]
            text = self._decode(newest)
        self._shown = len(text)
        return len(newest)


def _tail(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """The last PROMPT_TAIL tokens, or up to three more where those begin inside a character: one broken byte makes some decoders
    break all bytes that follow it without another token between, those of the answer too."""
    token_ids = _spoken(decode, token_ids)
    for count in range(PROMPT_TAIL, PROMPT_TAIL + 4):
        tail = list(token_ids[-count:])
        if not tail or not decode(tail).startswith(REPLACEMENT):
            return tail
    return list(token_ids[-PROMPT_TAIL:])


def _spoken(decode: Decode, token_ids: Sequence[int]) -> Sequence[int]:
    """Without special tokens that are skipped at the end: behind them alone, the answer's first word would be the first of a text
    and lose its space. Decodes each token a few times at most, however many are silent."""
    end, size = len(token_ids), PROMPT_TAIL
    while end > 0:
        begin = max(0, end - size)
        if not decode(token_ids[begin:end]):
            end, size = begin, 2 * size
        elif size > PROMPT_TAIL:
            size //= 2
        else:
            break
    return token_ids[:end]


class StopMatcher:
    """Text goes in as it is generated and comes out once it cannot be part of a stop string any more."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be shown now. When a stop string is complete, ``matched`` names it and this is the end of the text."""
        if not self._stops:
            return text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            return self._take(at + len(self.matched) if self._include else at, drop_rest=True)
        return self._take(len(self._held) - self._may_begin())

    def skip(self, text: str) -> str:
        """Text in which stop strings do not count (before ``min_tokens``)."""
        return self._take(len(self._held)) + text

    def flush(self) -> str:
        return self._take(len(self._held))

    def _take(self, count: int, *, drop_rest: bool = False) -> str:
        shown, self._held = self._held[:count], "" if drop_rest else self._held[count:]
        return shown

    def _may_begin(self) -> int:
        """Length of the longest end of what is held that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)
