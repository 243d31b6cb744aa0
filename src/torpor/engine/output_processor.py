"""From a request's tokens to its text: detokenization, stop strings, and where the text ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torpor.engine.detokenizer import IncrementalDecoder, StopMatcher
from torpor.engine.tokenizer import Tokenizer
from torpor.request import EngineOutput, FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What came up for one choice. The last one of a choice carries ``finish_reason``."""

    index: int  # 0 .. n-1
    text: str = ""  # whole characters, stop strings already cut
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


class OutputProcessor:
    """One choice. Feed it the engine's outputs in order, until a delta carries a finish reason."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams, index: int = 0) -> None:
        self._index = index
        self._sampling = sampling
        skip = sampling.skip_special_tokens
        self._decoder = IncrementalDecoder(lambda ids: tokenizer.decode(ids, skip_special_tokens=skip), prompt_token_ids)
        self._stops = StopMatcher(sampling.stop, include_in_output=sampling.include_stop_str_in_output)
        self._num_tokens = 0

    def process(self, output: EngineOutput) -> TextDelta:
        """A stop string ends the choice here, ahead of the engine: then the caller aborts the request."""
        text, used = "", 0
        for token_id in output.new_token_ids:
            used += 1
            ends_it = output.finish_reason is FinishReason.STOP and used == len(output.new_token_ids)
            text += self._push(token_id, hidden=ends_it and not self._sampling.include_stop_str_in_output)
            if self._stops.matched is not None:
                return self._delta(output, text, used, FinishReason.STOP, self._stops.matched)
        if output.finish_reason is not None:
            text += self._flush()
            if self._stops.matched is not None:
                return self._delta(output, text, used, FinishReason.STOP, self._stops.matched)
        return self._delta(output, text, used, output.finish_reason, output.stop_reason)

    def _push(self, token_id: int, *, hidden: bool) -> str:
        """``hidden``: the token that ended the text; it is counted but not shown."""
        self._num_tokens += 1
        if hidden:
            return ""
        new = self._decoder.push(token_id)
        if self._num_tokens <= self._sampling.min_tokens:
            return self._stops.skip(new)
        return self._stops.push(new)

    def _flush(self) -> str:
        rest = self._decoder.flush()
        shown = self._stops.push(rest) if rest else ""
        return shown if self._stops.matched is not None else shown + self._stops.flush()

    def _delta(
        self, output: EngineOutput, text: str, used: int, reason: FinishReason | None, stop_reason: int | str | None
    ) -> TextDelta:
        return TextDelta(
            index=self._index,
            text=text,
            token_ids=output.new_token_ids[:used],
            logprobs=None if output.logprobs is None else output.logprobs[:used],
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            kv_transfer_params=output.kv_transfer_params,
        )
