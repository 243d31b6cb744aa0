"""Log-probabilities in the two shapes of OpenAI's routes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from torpor.engine.frontend import Frontend
from torpor.request import TokenLogprobs
from torpor.server.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

PROMPT_TAIL = 4  # tokens: what is longer than these is no part of a character
FLOOR = -9999.0  # what OpenAI sends for minus infinity, which JSON cannot


def floored(logprob: float) -> float:
    return max(logprob, FLOOR)


class CompletionLogprobsBuilder:
    """Follows one choice: ``text_offset`` counts characters from the start of its text. A character of several tokens begins
    with the first of them and ends with the last; ``hides_special`` as the text was asked for."""

    def __init__(self, frontend: Frontend, prompt_token_ids: Sequence[int], *, hides_special: bool = True) -> None:
        self._frontend = frontend
        self._hides_special = hides_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_token_ids[-PROMPT_TAIL:]:  # it may end inside a character, which the answer then shows whole
            self._shown(token_id)
        self._offset = 0

    def build(self, positions: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        offsets = []
        for position in positions:
            offsets.append(self._offset)
            self._offset += self._shown(position.token_id)
        return CompletionLogprobs(
            text_offset=offsets,
            tokens=[self._name(p.token_id) for p in positions],
            token_logprobs=[floored(p.logprob) for p in positions],
            top_logprobs=[self._top(p) for p in positions],
        )

    def _shown(self, token_id: int) -> int:
        """Characters that are complete with this token."""
        hidden = self._hides_special and self._frontend.is_special(token_id)
        return 0 if hidden else len(self._decoder.decode(self._frontend.token_bytes(token_id)))

    def _name(self, token_id: int) -> str:
        """Its text, or as OpenAI spells what is none by itself: ``bytes:\\xe6\\x97``."""
        data = self._frontend.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}" for b in data)

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """The chosen token is always among them, as OpenAI has it. Of two that read the same, one is named by its id, as vLLM
        does it."""
        found = {}
        own = self._name(position.token_id)
        for token_id, logprob in zip(position.top_ids, position.top_logprobs, strict=True):
            name = own if token_id == position.token_id else self._name(token_id)
            taken = name in found or (name == own and token_id != position.token_id)
            found[f"token_id:{token_id}" if taken else name] = floored(logprob)
        return {**found, own: floored(position.logprob)}


def chat_logprobs(frontend: Frontend, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_position(frontend, p) for p in positions], refusal=None)


def _chat_position(frontend: Frontend, position: TokenLogprobs) -> TokenLogprob:
    top = [_top(frontend, i, p) for i, p in zip(position.top_ids, position.top_logprobs, strict=True)]
    own = _top(frontend, position.token_id, position.logprob)
    return TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)


def _top(frontend: Frontend, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(token=frontend.token_text(token_id), logprob=floored(logprob), bytes=list(frontend.token_bytes(token_id)))
