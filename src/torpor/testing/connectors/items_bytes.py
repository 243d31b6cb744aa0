"""Which bytes arrive, and when: placement, following a sleep, reads that are too late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from torpor.kvcache.types import KVCacheSpec
from torpor.testing.connectors.outcomes import Failure, NotApplicable
from torpor.testing.connectors.stage import Engine, Params, Stage

LAYOUTS = 5
CYCLES = 2
IN_FLIGHT_TRIES = 9
FOUND_S = 10.0
LEASE_S, ENDS_S, QUIET_S = 0.2, 10.0, 0.3
BIG = KVCacheSpec(
    model_id="stand-in@1", num_layers=8, num_blocks=130, block_size=16, num_kv_heads=4, head_dim=32, dtype="float32"
)  # 16 MiB for 64 blocks: some milliseconds of any transport


def random_spec(rng: random.Random) -> KVCacheSpec:
    return KVCacheSpec(
        model_id="stand-in@1",
        num_layers=rng.randint(1, 5),
        num_blocks=rng.randint(7, 40),
        block_size=rng.choice([2, 4, 8, 16]),
        num_kv_heads=rng.randint(1, 4),
        head_dim=rng.choice([4, 8, 12, 64]),
        dtype=rng.choice(["float32", "float16", "bfloat16"]),
    )


def placement(stage: Stage) -> str:
    """Bytes land in the right blocks, layers, halves and heads, and nowhere else; also behind a prefix that is there already."""
    for index in range(LAYOUTS):
        spec = random_spec(stage.random)
        p, d = stage.pair(spec=spec)
        count = stage.random.randint(2, min(6, spec.num_blocks // 2))
        there, here = (stage.random.sample(range(spec.num_blocks), count) for _ in range(2))
        if p is d:
            here = stage.random.sample(sorted(set(range(spec.num_blocks)) - set(there)), count)
        _place(stage, p, d, spec, there, here, prefix=index % 2)
        stage.close()
    return f"{LAYOUTS} layouts"


def _place(stage: Stage, p: Engine, d: Engine, spec: KVCacheSpec, there: list[int], here: list[int], prefix: int) -> None:
    prompt = stage.prompt(len(there), spec)
    params = p.prefill(stage.request(), prompt, there)
    before, owner_before = d.call("sums"), p.call("sums")
    wanted = here[prefix:]
    deadline = time.monotonic() + stage.patient(FOUND_S)
    while (outcome := d.call("read", stage.request(), prompt, params, wanted, prefix * spec.block_size)) == "nothing":
        if stage.by_params or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if outcome != "recving":
        raise Failure(f"a read that must succeed ended as {outcome!r} with {spec}")
    if not d.call("has_from", prompt, wanted[: d.call("blocks_asked")], prefix):
        raise Failure(f"other bytes than were handed over, or in other places: {there} to {wanted} with {spec}")
    changed = [block for block, (old, new) in enumerate(zip(before, d.call("sums"), strict=True)) if old != new]
    if not set(changed) <= set(wanted):
        raise Failure(f"blocks {sorted(set(changed) - set(wanted))} were written, which are not of the load ({wanted})")
    if p is not d and p.call("sums") != owner_before:
        raise Failure("reading changed the owner's KV cache")


def follow(stage: Stage) -> str:
    """After a sleep and a wake of P, of D, and of both, reads give the new bytes, and all memory had come back."""
    p, d = stage.pair()
    stage.carry(p, d, say="before any sleep")
    rounds: list[list[Engine]] = [[p]] if p is d else [[p], [d], [p, d], [d, p]]
    for cycle in range(CYCLES):
        for who in rounds:
            for engine in who:
                engine.sleep()
                _holds_nothing(engine)
            for engine in who:
                engine.wake()
            names = " and ".join(engine.name for engine in who)
            # The same blocks with other content: what was there before the sleep is wrong now.
            stage.carry(p, d, say=f"after {names} slept (cycle {cycle + 1})")
    return f"{CYCLES * len(rounds)} sleeps, P {'in another process' if stage.between_processes else 'in this process'}"


def _holds_nothing(engine: Engine) -> None:
    """Of others, while it sleeps; and nobody has leave to read it."""
    imports, grants = engine.call("imports"), engine.call("grants")
    if imports or grants:
        raise Failure(f"while {engine.name} sleeps it has {imports} imports of others, and {grants} grants to read it are open")


def in_flight(stage: Stage) -> str:
    """A sleep of either end while a read is under way, or a cancel: the read ends, right or failed, nothing writes to its blocks
    after that, and the memory comes back."""
    caught = 0
    for index in range(IN_FLIGHT_TRIES):
        p, d = stage.pair(spec=BIG)
        caught += _stop_during_read(stage, p, d, (p, d, None)[index % 3], delay_s=0.001 * (index // 3))
        stage.close()
    if not caught:
        raise NotApplicable("every read had ended before the sleep began")
    return f"{caught} of {IN_FLIGHT_TRIES} reads caught in flight"


def _stop_during_read(stage: Stage, p: Engine, d: Engine, sleeper: Engine | None, delay_s: float) -> bool:
    """By a sleep, or by a cancel where nobody sleeps."""
    there, here = list(range(64)), list(range(64, 128))
    prompt, name = stage.prompt(64, BIG), stage.request()
    params = p.prefill(stage.request(), prompt, there)
    if not stage.by_params:
        _until_found(d, prompt, stage)
    tokens = d.call("ask", name, prompt, params, here)
    time.sleep(delay_s)
    flying = bool(d.call("stats_text")["in flight"] > 0)
    if sleeper is None:
        d.call("cancel", name)
    else:
        sleeper.sleep()
    outcome = d.call("wait", name, stage.patient(FOUND_S)) if tokens > 0 else "failed"
    if sleeper is d:
        if outcome == "recving" and flying:
            raise Failure("a load that was under way when its engine slept was reported as complete: its KV is gone")
        d.wake()
        return flying
    before = d.call("sums")
    if outcome == "recving" and not d.has(prompt, here):
        raise Failure("a load that was under way when it was stopped was reported as complete with wrong bytes")
    time.sleep(stage.patient(0.05))
    if d.call("sums") != before:
        raise Failure(f"blocks of a load that was reported as {outcome!r} were written afterwards")
    if sleeper is p:
        p.wake()
    return flying


def blocks_end(stage: Stage) -> str:
    """The owner's blocks are free again when somebody has read them, when a peer says that it needs none of them, and when the
    lease has passed with nobody asking; each is reported once, and of a request that only tells nothing is. Whoever reads after
    that does not get what is in the blocks then."""
    p, d = stage.pair(here=True)  # within every child's reach, of a connector that is several
    _ends(stage, p, d, "a read", lambda prompt, params: stage.must_arrive(d, prompt, params, [4, 5, 6]))
    _ends(stage, p, d, "a peer that needs nothing", lambda prompt, params: _tell(stage, d, prompt, params))
    stage.close()
    p, d = stage.pair(here=True, handoff_lease_s=LEASE_S)
    late = _ends(stage, p, d, "a lease that passed", lambda prompt, params: None)
    _read_too_late(stage, p, d, *late)
    return "read, told, expired"


def _read_too_late(stage: Stage, p: Engine, d: Engine, prompt: list[int], params: Params) -> None:
    p.prefill(stage.request(), stage.prompt(), [1, 2, 3])  # its blocks were free
    outcome = d.read(stage.request(), prompt, params, [4, 5, 6])
    if outcome == "recving" and not d.has(prompt, [4, 5, 6][: d.call("blocks_asked")]):
        raise Failure("a read after its lease had passed was reported as complete, with what others had put into the blocks")


def _ends(stage: Stage, p: Engine, d: Engine, what: str, after: Callable[[list[int], Params], None]) -> tuple[list[int], Params]:
    prompt, name = stage.prompt(), stage.request()
    params = p.prefill(name, prompt, [1, 2, 3])
    kept = p.call("keeps")
    after(prompt, params)
    if kept and (found := p.call("reported", name, stage.patient(ENDS_S))) != "sending":
        raise Failure(f"after {what} the hand-off was reported as {found!r}: its blocks are never free again")
    return prompt, params


def _tell(stage: Stage, d: Engine, prompt: list[int], params: Params) -> None:
    name = stage.request()
    d.call("tell", name, prompt, params)
    if (found := d.call("reported", name, stage.patient(QUIET_S))) is not None:
        raise Failure(f"a request that loads nothing was reported as {found!r}")


def _until_found(d: Engine, prompt: list[int], stage: Stage) -> None:
    deadline = time.monotonic() + stage.patient(FOUND_S)
    while not d.call("knows", prompt) and time.monotonic() < deadline:
        time.sleep(0.02)


def late_read(stage: Stage) -> str:
    """A read that comes when the owner sleeps yields no bytes, is answered soon, and kills nobody (P4)."""
    _needs_peer(stage)
    p, d = stage.pair()
    stage.carry(p, d)
    prompt = stage.prompt()
    late = p.prefill(stage.request(), prompt, [1, 2, 3])
    p.sleep()
    stage.must_not_arrive(d, prompt, late, [4, 5, 6], "a read of a sleeping engine's KV")
    p.wake()
    stage.carry(p, d, say="after a late read")
    return f"P {'in another process' if stage.between_processes else 'in this process'}"


def old_epoch(stage: Stage) -> str:
    """What was handed over under another epoch is not read: after a wake, with a forged epoch, and of an engine that began anew
    under the same name."""
    _needs_peer(stage)
    if not stage.by_params:
        raise NotApplicable("it finds KV by the prompt's tokens: no reference names an epoch")
    p, d = stage.pair()
    stage.carry(p, d)
    prompt = stage.prompt()
    old = p.prefill(stage.request(), prompt, [1, 2, 3])
    first = p.epoch()
    p.sleep()
    if p.epoch() is not None:
        raise Failure(f"epoch() is {p.epoch()} while the KV cache is released")
    p.wake()
    if p.epoch() in (None, first):
        raise Failure(f"the epoch after a wake is {p.epoch()}, before the sleep it was {first}")
    # The same blocks have another prompt's KV now.
    new = p.prefill(stage.request(), stage.prompt(), [1, 2, 3])
    stage.must_not_arrive(d, prompt, old, [4, 5, 6], "a hand-off from before the sleep, read after the wake,")
    _forged(stage, p, d, old, new, prompt)
    return "an older, a forged and a restarted engine's"


def _forged(stage: Stage, p: Engine, d: Engine, old: Params, new: Params, prompt: list[int]) -> None:
    """``old`` with what ``new`` says of the epoch, whatever that is called: the blocks exist, and are another prompt's."""
    forged = {**old, **{key: new[key] for key in new if key not in ("remote_request_id", "remote_block_ids")}}
    stage.must_not_arrive(d, prompt, forged, [4, 5, 6], "an old hand-off under the new epoch")
    kept = stage.prompt()
    params = p.prefill(stage.request(), kept, [1, 2, 3])
    p.close()
    again = stage.owner("P", "producer")
    fresh = again.prefill(stage.request(), stage.prompt(), [1, 2, 3])
    moved = {**params, **{key: fresh[key] for key in fresh if key in ("remote_host", "remote_port")}}
    stage.must_not_arrive(d, kept, moved, [4, 5, 6], "a hand-off of an engine that began anew since")
    stage.carry(again, d, say="from an engine that began anew")


def _needs_peer(stage: Stage) -> None:
    if stage.subject.kind.reach == "engine":
        raise NotApplicable("no other engine reads what it keeps")
