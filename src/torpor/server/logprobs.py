"""Log-probabilities in the two shapes of OpenAI's routes."""

from __future__ import annotations

from collections.abc import Sequence

from torpor.engine.frontend import Frontend
from torpor.request import TokenLogprobs
from torpor.server.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

FLOOR = -9999.0  # what OpenAI sends for minus infinity, which JSON cannot


def floored(logprob: float) -> float:
    return max(logprob, FLOOR)


class CompletionLogprobsBuilder:
    """``text_offset`` counts characters from the start of the choice's text, so one builder follows one choice."""

    def __init__(self, frontend: Frontend, offset: int = 0) -> None:
        self._frontend = frontend
        self._offset = offset

    def build(self, positions: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        texts = [self._frontend.token_text(p.token_id) for p in positions]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return CompletionLogprobs(
            text_offset=offsets,
            tokens=texts,
            token_logprobs=[floored(p.logprob) for p in positions],
            top_logprobs=[self._top(p) for p in positions],
        )

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """The chosen token is always among them, as OpenAI has it."""
        pairs = [*zip(position.top_ids, position.top_logprobs, strict=True), (position.token_id, position.logprob)]
        return {self._frontend.token_text(i): floored(p) for i, p in pairs}


def chat_logprobs(frontend: Frontend, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_position(frontend, p) for p in positions], refusal=None)


def _chat_position(frontend: Frontend, position: TokenLogprobs) -> TokenLogprob:
    top = [_top(frontend, i, p) for i, p in zip(position.top_ids, position.top_logprobs, strict=True)]
    own = _top(frontend, position.token_id, position.logprob)
    return TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)


def _top(frontend: Frontend, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(token=frontend.token_text(token_id), logprob=floored(logprob), bytes=list(frontend.token_bytes(token_id)))
