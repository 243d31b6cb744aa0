"""When a request has said enough."""

from __future__ import annotations

from torpor.request import FinishReason
from torpor.scheduler.sequence import Sequence


def check_stop(seq: Sequence, context_len: int) -> tuple[FinishReason | None, int | None]:
    """Why the newest token is the last one (None: it is not), and the stop token that the client named. As in vLLM, the model's
    own end-of-sequence token is no ``stop_reason``. Stop strings are the front end's: they need text."""
    sampling, token, count = seq.sampling, seq.outputs[-1], len(seq.outputs)
    if count >= sampling.min_tokens:
        if token in seq.request.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if token in sampling.stop_token_ids:
            return FinishReason.STOP, token
    if count >= sampling.max_tokens or len(seq.tokens) >= context_len:
        return FinishReason.LENGTH, None
    return None, None
