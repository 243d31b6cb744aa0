"""What is refused: an engine that must not sleep, requests and peers that are wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

from torpor.engine.base import SleepRequest
from torpor.engine.config import SleepConfig
from torpor.engine.kv_connector import choose_connector
from torpor.engine.sleep_plan import sleep_rules
from torpor.errors import ConnectorError
from torpor.testing.connectors.outcomes import Failure, NotApplicable
from torpor.testing.connectors.process import EngineError
from torpor.testing.connectors.stage import Stage
from torpor.testing.kv_engine import SMALL_SPEC

TAGS = ("weights", "kv_cache", "runtime")
BAD_PARAMS: tuple[dict[str, Any], ...] = (
    {"do_remote_prefill": True},
    {"do_remote_prefill": "yes"},
    {"do_remote_decode": 1.5},
    {"do_remote_prefill": True, "remote_block_ids": "all of them"},
)


def refusal(stage: Stage) -> str:
    """A connector that does not declare ``supports_sleep_mode`` is refused: at start-up with sleep mode, and with pools only by
    the sleep that would unmap the KV cache; a pause never is (E4). One that declares it is not refused. One that is made of
    others declares it only if all of those do."""
    kind, config = stage.subject.kind, stage.subject.config("both", "E", "/nonexistent")
    deaf = [child.__name__ for child in kind.children if not child.supports_sleep_mode]
    if deaf and kind.supports_sleep_mode:
        raise Failure(f"it declares supports_sleep_mode, and its {', '.join(deaf)} does not")
    refused = _refuses(lambda: choose_connector(config, SleepConfig(enable_sleep_mode=True), kind))
    rules = sleep_rules(SleepConfig(enable_pools=True), choose_connector(config, SleepConfig(enable_pools=True), kind))
    asked = {f"sleep(level={level})": SleepRequest(level=level, mode="wait") for level in (1, 2)}
    asked["release_kv_cache_memory()"] = SleepRequest(policies={"kv_cache": "discard"}, mode="wait")
    found = {name: _refuses(lambda request=request: rules.plan(request, TAGS)) for name, request in asked.items()}
    if _refuses(lambda: rules.plan(SleepRequest(level=0, mode="wait"), TAGS)):
        raise Failure("a pause is refused")
    wrong = [name for name, was in {"start-up with sleep mode": refused, **found}.items() if was == kind.supports_sleep_mode]
    if wrong:
        found_out = (
            "declares supports_sleep_mode, and is refused"
            if kind.supports_sleep_mode
            else "does not declare it, and is not refused"
        )
        raise Failure(f"it {found_out}: {', '.join(wrong)}")
    return "not refused" if kind.supports_sleep_mode else "refused everywhere but for a pause"


def _refuses(call: Any) -> bool:
    try:
        call()
    except ConnectorError as error:
        if not error.fields.get("connector"):
            raise Failure(f"the refusal does not name the connector: {error}") from error
        return True
    return False


def wrong_requests(stage: Stage) -> str:
    """Malformed ``kv_transfer_params`` are a RequestError at the door, and change nothing."""
    if not stage.by_params:
        raise NotApplicable("it takes no kv_transfer_params")
    p, d = stage.pair()
    for params in BAD_PARAMS:
        outcome = d.read(stage.request(), stage.prompt(), params, [4, 5, 6])
        if outcome != "refused":
            raise Failure(f"kv_transfer_params {params} are not refused with a RequestError ({outcome})")
    stage.carry(p, d, say="after malformed requests")
    return f"{len(BAD_PARAMS)} kinds"


def other_layout(stage: Stage) -> str:
    """A peer whose KV cache has another layout, or is another model's, is never read."""
    if stage.subject.kind.reach == "engine":
        raise NotApplicable("no other engine reads what it keeps")
    p = stage.engine("P", "producer")
    others = {
        "heads": dataclasses.replace(SMALL_SPEC, num_kv_heads=1),
        "layers": dataclasses.replace(SMALL_SPEC, num_layers=3),
        "dtype": dataclasses.replace(SMALL_SPEC, dtype="float16", head_dim=16),
        "model": dataclasses.replace(SMALL_SPEC, model_id="stand-in@2"),
    }
    for name, spec in others.items():
        d = stage.engine(f"D {name}", "consumer", spec=spec)
        prompt = stage.prompt()
        params = p.prefill(stage.request(), prompt, [1, 2, 3])
        try:
            outcome = d.read(stage.request(), prompt, params, [4, 5, 6])
        except EngineError:
            outcome = "refused"
        if outcome == "recving":
            raise Failure(f"KV of an engine with other {name} was read")
    d = stage.engine("D", "consumer")
    stage.carry(p, d, say="after peers with other layouts knocked")
    return ", ".join(others)
