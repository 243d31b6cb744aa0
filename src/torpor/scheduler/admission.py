"""What is looked at before a request is taken: a request that was added can always be computed."""

from __future__ import annotations

import secrets

import msgspec

from torpor.errors import ContextLengthError, RequestError
from torpor.kvcache.manager import KVCacheManager
from torpor.kvcache.prefix import MAX_TOKEN_ID
from torpor.request import GenerationRequest, SamplingParams
from torpor.scheduler.base import SchedulerConnector


def check_request(
    request: GenerationRequest, kv: KVCacheManager, max_model_len: int, connector: SchedulerConnector | None
) -> None:
    """RequestError naming the field that is wrong. Changes nothing."""
    _check_prompt(request.prompt_token_ids, kv, max_model_len)
    if request.sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.sampling.max_tokens}, it must be 1 or more", param="max_tokens")
    params = request.kv_transfer_params
    if params is None:
        return
    if connector is not None:
        connector.check_params(params, len(request.prompt_token_ids))
    elif params.get("do_remote_prefill") or params.get("do_remote_decode"):
        raise RequestError(
            "kv_transfer_params ask for a KV transfer, but this engine has no KV connector: start it with --kv-connector",
            param="kv_transfer_params",
        )


def _check_prompt(prompt: list[int], kv: KVCacheManager, max_model_len: int) -> None:
    if not prompt:
        raise RequestError("the prompt has no tokens", param="prompt")
    # One position is left for the first generated token.
    if len(prompt) >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, more than the {max_model_len - 1} that max_model_len ({max_model_len}) allows",
            param="prompt",
            tokens=len(prompt),
            limit=max_model_len,
            setting="max_model_len",
        )
    if len(prompt) >= kv.capacity_tokens:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens; the whole KV cache has room for {kv.capacity_tokens - 1}"
            f" ({kv.num_blocks} blocks of {kv.block_size}): raise num_blocks or kv_cache_bytes",
            param="prompt",
            tokens=len(prompt),
            limit=kv.capacity_tokens,
            setting="num_blocks",
        )
    if min(prompt) < 0 or max(prompt) > MAX_TOKEN_ID:
        raise RequestError(f"the prompt has a token id outside 0..{MAX_TOKEN_ID}", param="prompt")


def seeded(sampling: SamplingParams) -> SamplingParams:
    """With a seed chosen now where the client gave none, so that a request that is computed again says the same."""
    if sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=secrets.randbits(63))
