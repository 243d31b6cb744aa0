"""The two halves of a prefill/decode request, made from the client's one."""

from __future__ import annotations

import json
from typing import Any

from torpor.errors import RequestError

# As vLLM's routers send it: "keep the KV of this prompt for somebody who will come for it".
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# One token is sampled and thrown away: what shapes an answer is the decode engine's.
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "echo", "logprobs", "top_logprobs", "return_token_ids")


def parse_body(raw: bytes) -> dict[str, Any]:
    """RequestError for what is no JSON object, or tries to steer the engines' own channel."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the body is not valid JSON: {e}") from e
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if body.pop("kv_transfer_params", None) is not None:
        raise RequestError("kv_transfer_params are set by the router, not by its clients", param="kv_transfer_params")
    return body


def why_not_split(body: dict[str, Any]) -> str | None:
    """A hand-off serves one sequence. None when this request is one; else a word for the metrics."""
    if body.get("n") not in (None, 1):
        return "several_choices"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(p, int) for p in prompt):
        return "several_prompts"
    return None


def prefill_body(body: dict[str, Any], chat: bool) -> bytes:
    half = {k: v for k, v in body.items() if k not in NOT_FOR_PREFILL}
    half.update(stream=False, max_tokens=1, n=1, kv_transfer_params=PREFILL_PARAMS)
    if chat:
        half["max_completion_tokens"] = 1
    return json.dumps(half).encode()


def decode_body(body: dict[str, Any], params: dict[str, Any] | None) -> bytes:
    """Without ``params`` the decode engine prefills by itself."""
    return json.dumps(body if params is None else {**body, "kv_transfer_params": params}).encode()


def hand_off_of(answer: bytes) -> dict[str, Any] | None:
    """The prefill's ``kv_transfer_params``; None when the answer has none."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    params = found.get("kv_transfer_params") if isinstance(found, dict) else None
    return params if isinstance(params, dict) and params else None
