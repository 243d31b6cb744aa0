"""Peers that die, or say nothing (P2, P5): in real processes."""

from __future__ import annotations

import time
from typing import Any

from torpor.testing.connectors.outcomes import Failure
from torpor.testing.connectors.process import EngineError
from torpor.testing.connectors.stage import CALL_S, EngineApart, Stage
from torpor.testing.connectors.subject import WITHDRAW_S as USUAL_WITHDRAW_S

WITHDRAW_S = 1.0  # for an engine that must not wait long; others wait for the subject's
SLACK_S = 8.0  # for a busy machine


def peer_crash(stage: Stage) -> str:
    """SIGKILL. A reader that died holds nothing up; an owner that died costs its readers a load, and nothing else."""
    p, d = stage.engine_apart("P", "producer"), stage.engine_apart("D", "consumer")
    stage.carry(p, d)
    d.worker.kill()
    _quick(stage, p, "the sleep of an engine whose reader was killed")
    p.wake()
    again = stage.engine_apart("D", "consumer")
    stage.carry(p, again, say="for a reader that began anew")
    prompt = stage.prompt()
    lost = p.prefill(stage.request(), prompt, [1, 2, 3])
    p.worker.kill()
    stage.must_not_arrive(again, prompt, lost, [4, 5, 6], "a read of an engine that was killed")
    _quick(stage, again, "the sleep of an engine whose owner was killed")
    again.wake()
    fresh = stage.engine_apart("P", "producer")
    stage.carry(fresh, again, say="from an owner that began anew")
    return "a reader and an owner killed"


def silent_peer(stage: Stage) -> str:
    """SIGSTOP. A reader that says nothing is met by the deadline, by name, or holds nothing up; everybody else is served."""
    withdraw_s = stage.patient(WITHDRAW_S)
    p = stage.engine_apart("P", "producer", withdraw_timeout_s=withdraw_s)
    d = stage.engine_apart("D", "consumer")
    stage.carry(p, d)
    d.stop()
    waited = _meet(stage, p, d, withdraw_s)
    other = stage.engine_apart("other", "consumer")
    stage.carry(p, other, say="for somebody else, while one peer says nothing")
    d.go_on()
    stage.carry(p, d, say="for a peer that came to")
    p.sleep()
    p.wake()
    _silent_owner(stage, p, d)
    return "met by the deadline, by name" if waited else "holds nothing up"


def _meet(stage: Stage, p: EngineApart, d: EngineApart, timeout_s: float) -> bool:
    begun = time.monotonic()
    try:
        report = p.call("doze", timeout_s=WITHDRAW_S + SLACK_S + 2)
    except EngineError as error:
        _check_named(str(error), d)
        _check_time(stage, begun, timeout_s)
        if p.call("residency") != "resident" or not p.call("published"):
            raise Failure("after a release that failed the KV cache is not mapped, or not served") from error
        return True
    _check_time(stage, begun, timeout_s)
    if report["held"]:
        raise Failure(f"{report['held']} bytes are held by {report['holders']}, and the sleep did not wait for a peer")
    p.wake()
    return False


def _check_named(error: str, d: EngineApart) -> None:
    if "PeerError" not in error or d.name not in error:
        raise Failure(f"a peer that says nothing must be a PeerError that names it ({d.name}), not: {error}")


def _check_time(stage: Stage, begun: float, timeout_s: float) -> None:
    took = time.monotonic() - begun
    if took > timeout_s + stage.patient(SLACK_S):
        raise Failure(f"a release with withdraw_timeout_s={timeout_s} took {took:.1f} s while a peer said nothing")


def _silent_owner(stage: Stage, p: EngineApart, d: EngineApart) -> None:
    """One-sided reads may go on without the owner's process: then the bytes must be right. A store that had not finished keeping
    the prompt gives the beginning of it."""
    prompt = stage.prompt()
    params = p.prefill(stage.request(), prompt, [1, 2, 3])
    p.stop()
    outcome = d.call("read", stage.request(), prompt, params, [4, 5, 6], timeout_s=CALL_S)
    if outcome == "recving" and not d.has(prompt, [4, 5, 6][: d.call("blocks_asked")]):
        raise Failure("a read of an engine that is stopped was reported as complete with wrong bytes")
    _quick(stage, d, "the sleep of an engine whose owner says nothing")
    d.wake()
    before = d.call("sums")
    p.go_on()
    time.sleep(stage.patient(0.2))
    if d.call("sums") != before:
        raise Failure("bytes of a read that was given up landed in the KV cache when the owner went on")
    stage.carry(p, d, say="after the owner went on")


def _quick(stage: Stage, engine: EngineApart, what: str) -> dict[str, Any]:
    begun = time.monotonic()
    report = engine.sleep()
    if time.monotonic() - begun > stage.patient(USUAL_WITHDRAW_S + SLACK_S):
        raise Failure(f"{what} took {time.monotonic() - begun:.1f} s")
    return report
