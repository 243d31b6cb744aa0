"""Nothing grows from sleep to sleep."""

from __future__ import annotations

import time

from torpor.testing.connectors.outcomes import Failure
from torpor.testing.connectors.stage import Engine, Stage

WARM_UP, CYCLES = 3, 8
BYTES = ("pinned bytes", "mapped bytes of memory files", "device bytes", "imports", "bytes for images")
RESOURCES = ("descriptors", "threads", "Python threads")
SETTLE_S = 2.0  # for threads that end a moment after they were told to
RESIDENT_SLACK_BYTES = 256 << 10  # a cycle: what an allocator takes and gives
Vitals = dict[str, dict[str, int]]  # of the processes, by the engine in it


def bytes_flat(stage: Stage) -> str:
    """Host and device bytes are the same after every sleep and wake: nothing is registered, pinned, mapped or kept twice."""
    grown, resident = _cycles(stage, BYTES)
    if grown:
        raise Failure(f"over {CYCLES} cycles: {grown}")
    if resident > CYCLES * RESIDENT_SLACK_BYTES:
        raise Failure(f"a process has {resident} bytes more after {CYCLES} cycles")
    return f"{CYCLES} cycles"


def resources_flat(stage: Stage) -> str:
    """Descriptors and threads are as many after every sleep and wake."""
    grown, _ = _cycles(stage, RESOURCES)
    if grown:
        raise Failure(f"over {CYCLES} cycles: {grown}")
    return f"{CYCLES} cycles"


def _cycles(stage: Stage, names: tuple[str, ...]) -> tuple[str, int]:
    """What is more at the end than after the warm-up, in the processes of both; and by how much the resident memory is where it
    has grown most."""
    p, d = stage.pair()
    seen = [_cycle(stage, p, d) for _ in range(WARM_UP + CYCLES)]
    before, after = seen[WARM_UP], _asleep(stage, p, d)
    deadline = time.monotonic() + stage.patient(SETTLE_S)
    while _grown(names, before, after) and time.monotonic() < deadline:
        time.sleep(0.05)
        after = _vitals(stage, p, d)
    resident = max(_least_resident(name, seen[-1], after) - _least_resident(name, seen[WARM_UP - 1], before) for name in before)
    return _grown(names, before, after), resident


def _least_resident(engine: str, *seen: Vitals) -> int:
    """Of two cycles: what comes and goes as a huge page does so every other time."""
    return min(vitals[engine]["resident bytes"] for vitals in seen)


def _grown(names: tuple[str, ...], before: Vitals, after: Vitals) -> str:
    return ", ".join(
        f"{name} of {engine} {then[name]} to {after[engine][name]}"
        for engine, then in before.items()
        for name in names
        if after[engine][name] > then[name]
    )


def _cycle(stage: Stage, p: Engine, d: Engine) -> Vitals:
    vitals = _asleep(stage, p, d)
    for engine in [p] if p is d else [p, d]:
        engine.wake()
    return vitals


def _asleep(stage: Stage, p: Engine, d: Engine) -> Vitals:
    """What there is while both sleep, and so nothing of each other; both woke before."""
    if p.call("residency") != "resident":
        for engine in [p] if p is d else [p, d]:
            engine.wake()
    stage.carry(p, d)
    for engine in [p] if p is d else [p, d]:
        engine.sleep()
    return _vitals(stage, p, d)


def _vitals(stage: Stage, p: Engine, d: Engine) -> Vitals:
    """By engine: of one, when both are in this process."""
    return {engine.name: engine.call("vitals") for engine in ([p, d] if stage.between_processes else [p])}
