"""Sleeps and wakes that are repeated, fail, or are done in part; and the end."""

from __future__ import annotations

from collections.abc import Callable

from torpor.testing.connectors.outcomes import Failure, NotApplicable
from torpor.testing.connectors.process import EngineError
from torpor.testing.connectors.stage import Engine, Stage


def own_buffers(stage: Stage) -> str:
    """What the connector allocates while it registers lies in no pool, so it never sleeps (E1)."""
    p, _ = stage.pair()
    taken = {tag: nbytes for tag, nbytes in p.call("taken_at_start").items() if nbytes}
    if taken:
        raise Failure(f"while it registered it allocated in pools: {taken} bytes, which a sleep takes away under it")
    return ""


def double_sleep(stage: Stage) -> str:
    """Repeating a finished sleep or wake changes nothing, and says so."""
    p, d = stage.pair()
    stage.carry(p, d)
    p.call("release")
    p.call("release")
    if p.epoch() is not None or p.call("published"):
        raise Failure("epoch() or get_handshake_metadata() is not None while the KV cache is released")
    p.call("restore")
    epoch = p.epoch()
    p.call("restore")
    if epoch is None or p.epoch() != epoch:
        raise Failure(f"a second restore made epoch {p.epoch()} of {epoch}")
    p.sleep()
    if not p.sleep()["noop"]:
        raise Failure("the second of two sleeps did something")
    p.wake()
    epoch = p.epoch()
    if not p.wake()["noop"] or p.epoch() != epoch:
        raise Failure(f"the second of two wakes did something: epoch {p.epoch()}, it was {epoch}")
    stage.carry(p, d, say="after everything was done twice")
    return ""


def failed_release(stage: Stage) -> str:
    """A sleep that fails after or in the release leaves everybody served; the next sleep is a true one (M2, M12)."""
    looked = ["somebody else's hook", "the driver's unmap"]
    p, d = stage.pair(here=True)  # where ``fail_next`` is
    stage.carry(p, d)
    p.call("break_hook", "release")
    _must_fail(p.sleep, "a sleep in which another hook fails")
    _served(stage, p, d, "after a sleep that another hook stopped")
    p.call("break_driver", "UNMAP", 1, 1)
    _must_fail(p.sleep, "a sleep in which the driver's unmap fails")
    p.call("mend_driver")
    p.wake()
    _served(stage, p, d, "after a sleep that the driver stopped")
    if p.call("fail_next", "release"):
        looked.append("its own transport")
        _must_fail(p.sleep, "a sleep in which the transport's deregistration fails")
        _served(stage, p, d, "after a release that failed")
    p.sleep()
    p.wake()
    _served(stage, p, d, "after the sleep that was tried again")
    return "; ".join(looked)


def failed_restore(stage: Stage) -> str:
    """A wake that fails before, in or beside the restore is tried again by the next one (M3, M5)."""
    looked = ["the driver's memory", "somebody else's hook"]
    p, d = stage.pair(here=True)
    stage.carry(p, d)
    p.sleep()
    p.call("break_driver", "CREATE", 1, 1)
    _must_fail(p.wake, "a wake without memory")
    p.call("mend_driver")
    if p.call("published"):
        raise Failure("after a wake that got no memory it is published all the same")
    p.wake()
    _served(stage, p, d, "after a wake that got no memory at first")
    p.sleep()
    p.call("break_hook", "restore")
    _must_fail(p.wake, "a wake in which another hook fails")
    p.wake()
    _served(stage, p, d, "after a wake in which another hook failed at first")
    p.sleep()
    if p.call("fail_next", "restore"):
        looked.append("its own transport")
        _must_fail(p.wake, "a wake in which the transport's registration fails")
        if p.call("published"):
            raise Failure("a registration that failed is published")
    p.wake()
    _served(stage, p, d, "after the wake that was tried again")
    return "; ".join(looked)


def partial_wake(stage: Stage) -> str:
    """While other pools wake, and the KV cache does not, nothing is registered or published (E7)."""
    p, d = stage.pair()
    stage.carry(p, d)
    p.call("doze", {"kv_cache": "discard", "weights": "host"})
    p.call("rise", ["weights"])
    if p.epoch() is not None or p.call("published"):
        raise Failure("weights woke and the KV cache did not, and the connector says that it can be read")
    p.wake()
    _served(stage, p, d, "after the rest woke too")
    p.call("doze", {"weights": "host"})
    if p.epoch() is None:
        raise Failure("a sleep of the weights alone released the KV cache")
    p.call("rise", ["weights"])
    _served(stage, p, d, "after the weights alone slept")
    return ""


def new_weights(stage: Stage) -> str:
    """KV that was computed with other weights is read by nobody: not what was handed over before an update, and not between two
    engines of which only one was updated. When both were, reads go on (E6, P5)."""
    if not stage.subject.kind.supports_weight_updates:
        raise NotApplicable("it does not declare supports_weight_updates: its engine's weights are not updated")
    p, d = stage.pair()
    stage.carry(p, d)
    prompt = stage.prompt()
    params = p.prefill(stage.request(), prompt, [1, 2, 3])
    for engine in {p, d}:
        _update(engine, "stand-in@2")
    _must_be_gone(stage, d, prompt, params, "KV of the weights before the update")
    stage.carry(p, d, say="after both engines had got new weights")
    if p is d:
        return "one engine"
    for version, first, second, theirs in (("stand-in@3", d, p, "older"), ("stand-in@4", p, d, "newer")):
        _update(first, version)
        prompt = stage.prompt()
        params = p.prefill(stage.request(), prompt, [1, 2, 3])
        _must_be_gone(stage, d, prompt, params, f"KV of an engine with {theirs} weights")
        _update(second, version)
        stage.carry(p, d, say="after the second engine had got the same weights")
    return "both, and either alone"


def _update(engine: Engine, version: str) -> None:
    engine.sleep()
    engine.call("set_weights_version", version)
    engine.wake()


def _must_be_gone(stage: Stage, d: Engine, prompt: list[int], params: dict[str, object], what: str) -> None:
    outcome = d.read(stage.request(), prompt, params, [4, 5, 6])
    if outcome == "recving":
        raise Failure(f"{what} was read")


def shutdown_unsubscribes(stage: Stage) -> str:
    """After ``shutdown`` the memory layer calls nothing of the connector, and nothing of it is left (E5)."""
    p, d = stage.pair()
    stage.carry(p, d)
    _leave(p)
    other = stage.owner("other")
    other.sleep()
    _leave(other, "while the KV cache sleeps")
    if p is not d:
        fresh = stage.owner("P2", "producer")
        stage.carry(fresh, d, say="from another engine, after the first was shut down")
    return "awake and asleep"


def _leave(engine: Engine, say: str = "") -> None:
    wrong = engine.call("leave")
    if wrong:
        raise Failure(f"{wrong[0]} {say}".rstrip())
    if engine.call("subscribed"):
        raise Failure(f"after the shutdown {say} a hook of its own is still subscribed to the KV cache".replace("  ", " "))
    if engine.call("grants"):
        raise Failure("after the shutdown grants of its memory are still open")
    engine.wake()
    report = engine.call("doze")
    if report["held"]:
        raise Failure(f"{report['held']} bytes are held after the shutdown: {report['holders']}")
    engine.wake()
    if engine.epoch() is not None or engine.call("published"):
        raise Failure("after its shutdown it can be read again")


def _must_fail(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except EngineError:
        return
    raise Failure(f"{what} succeeded")


def _served(stage: Stage, p: Engine, d: Engine, say: str) -> None:
    if p.call("residency") != "resident":
        raise Failure(f"the KV cache is {p.call('residency')} {say}")
    if p.epoch() is None or not p.call("published"):
        raise Failure(f"the KV cache is published to nobody {say}")
    stage.carry(p, d, say=say)
