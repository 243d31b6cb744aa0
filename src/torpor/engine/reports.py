"""Sleep, wake and pause reports as plain data (msgpack and JSON types): what an operator or a program reads.

    sleep, release_kv_cache   operation, state, level, mode, policies, noop, reason, seconds, phases_s, hooks_s,
                              unmapped_bytes, returned_bytes, held_bytes, tags: [{tag, policy, unmapped_bytes,
                              returned_bytes, image_bytes, copied_bytes, holders: [{who, bytes}], noop}]
    wake_up                   operation, state, noop, reason, seconds, phases_s, hooks_s, mapped_bytes, restored_bytes,
                              missing_tags, refilled_tags, tags: [{tag, mapped_bytes, restored_bytes, content, noop}]
    pause                     operation, state, mode, noop, reason, seconds, phases_s
    resume                    the same without mode
    update_weights            operation, state, model, model_id, seconds

``noop``: nothing was changed by the call (M9), no memory, no content, no request, and the engine is in the state it was in. A
call that ends a pause or cancels a drain has changed something. Calls that joined one sleep share its report. ``reason`` says why
there was nothing to do, or what was done instead of what the call is named for.

``seconds`` is the time from the call to its end; ``phases_s`` says where it went (``drain``, then the memory layer's phases), and
``hooks_s`` what of it each hook took: a connector's release before the unmap, its registration after the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from torpor.engine.base import EngineState
from torpor.engine.sleep_plan import SleepPlan
from torpor.memory.types import SleepReport, WakeReport


def plain(value: Any) -> Any:
    """Dataclasses, structs and enums as what msgpack and JSON have: dicts, lists, strings, numbers."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def slept_report(
    plan: SleepPlan,
    state: EngineState,
    report: SleepReport | None,
    seconds: float,
    drain_s: float,
    *,
    noop: bool,
    reason: str | None = None,
) -> dict[str, Any]:
    """``report`` is None when there was nothing to ask the memory layer."""
    return {
        "operation": plan.operation,
        "state": state.value,
        "level": plan.level,
        "mode": plan.mode,
        "policies": dict(plan.policies),
        "noop": noop,
        "reason": reason,
        "seconds": seconds,
        "phases_s": {"drain": drain_s, **(report.phases_s if report else {})},
        "hooks_s": report.hooks_s if report else {},
        "unmapped_bytes": report.unmapped_bytes if report else 0,
        "returned_bytes": report.returned_bytes if report else 0,
        "held_bytes": report.held_bytes if report else 0,
        "tags": plain(report.tags) if report else [],
    }


def paused_report(
    plan: SleepPlan, state: EngineState, seconds: float, *, noop: bool, reason: str | None = None
) -> dict[str, Any]:
    """Of a pause, and of a sleep that unmaps nothing."""
    if plan.operation != "pause":
        return slept_report(plan, state, None, seconds, seconds, noop=noop, reason=reason)
    return {
        "operation": "pause",
        "state": state.value,
        "mode": plan.mode,
        "noop": noop,
        "reason": reason,
        "seconds": seconds,
        "phases_s": {"drain": seconds},
    }


def resumed_report(state: EngineState, *, noop: bool, reason: str | None) -> dict[str, Any]:
    return {
        "operation": "resume",
        "state": state.value,
        "noop": noop,
        "reason": reason,
        "seconds": 0.0,
        "phases_s": {},
    }


def updated_report(state: EngineState, model: str, model_id: str, seconds: float) -> dict[str, Any]:
    return {
        "operation": "update_weights",
        "state": state.value,
        "model": model,
        "model_id": model_id,
        "seconds": seconds,
    }


def wake_report(
    report: WakeReport | None,
    state: EngineState,
    *,
    missing: Sequence[str] = (),
    refilled: Sequence[str] = (),
    seconds: float = 0.0,
    refill_s: float = 0.0,
    reason: str | None = None,
    noop: bool,
) -> dict[str, Any]:
    """``report`` is None when there was nothing to wake."""
    tags = report.tags if report else ()
    return {
        "operation": "wake_up",
        "state": state.value,
        "noop": noop,
        "reason": reason,
        "seconds": seconds,
        "phases_s": {**(report.phases_s if report else {}), **({"refill": refill_s} if refilled else {})},
        "hooks_s": report.hooks_s if report else {},
        "mapped_bytes": sum(t.mapped_bytes for t in tags),
        "restored_bytes": sum(t.restored_bytes for t in tags),
        "missing_tags": list(missing),
        "refilled_tags": list(refilled),
        "tags": plain(tags),
    }
