"""Which engine is asked next: states, backoff, load, turns; and the router's configuration."""

from __future__ import annotations

import pytest

from torpor.errors import ConfigurationError
from torpor.router import RouterConfig
from torpor.router.backends import Backend, BackendState, Group
from torpor.router.config import Policy

CONFIG = RouterConfig(decode=("http://d",), backoff_s=1.0, max_backoff_s=5.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def group(count: int, policy: Policy = "least_loaded", clock: Clock | None = None) -> Group:
    return Group([Backend(f"http://e{i}", "decode", CONFIG, clock or Clock()) for i in range(count)], policy)


def urls(backends: list[Backend]) -> str:
    return "".join(b.url[-1] for b in backends)


def test_the_least_loaded_is_first_and_equals_take_turns() -> None:
    g = group(3)
    assert urls(g.usable()) == "012"
    g.take_turn()
    assert urls(g.usable()) == "120"
    with g.backends[1].busy(), g.backends[2].busy(), g.backends[2].busy():
        assert urls(g.usable()) == "012"
    assert [b.in_flight for b in g.backends] == [0, 0, 0]


def test_round_robin_does_not_look_at_the_load() -> None:
    g = group(3, "round_robin")
    with g.backends[0].busy():
        assert urls(g.usable()) == "012"
    g.take_turn()
    assert urls(g.usable()) == "120"
    g.take_turn()
    g.take_turn()
    assert urls(g.usable()) == "012"


def test_load_is_given_back_when_a_request_fails() -> None:
    (backend,) = group(1).backends
    with pytest.raises(ValueError, match="x"), backend.busy():
        raise ValueError("x")
    assert backend.in_flight == 0


def test_only_those_believed_to_serve_are_usable_but_all_are_candidates() -> None:
    g = group(4)
    g.backends[0].saw_silence("refused")
    g.backends[1].saw_not_ready("asleep")
    g.backends[3].saw_failure("reset")
    assert urls(g.usable()) == "2"
    assert urls(g.candidates()) == "2103"
    assert not g.any_ready
    g.backends[2].saw_ready()
    assert g.any_ready


def test_backoff_doubles_up_to_a_bound_and_an_answer_ends_it() -> None:
    clock = Clock()
    (backend,) = group(1, clock=clock).backends
    for pause in (1, 2, 4, 5, 5):
        backend.saw_failure("reset")
        clock.now += pause - 0.01
        assert backend.resting
        clock.now += 0.02
        assert not backend.resting
    backend.saw_failure("reset")
    backend.saw_answer()
    assert not backend.resting
    backend.saw_failure("reset")
    clock.now += 1.01
    assert not backend.resting


def test_a_probe_does_not_end_a_backoff() -> None:
    g = group(1)
    g.backends[0].saw_failure("reset")
    g.backends[0].saw_ready()
    assert g.backends[0].state is BackendState.READY
    assert g.usable() == []
    assert len(g.candidates()) == 1


def test_stats_are_frozen_and_say_why() -> None:
    (backend,) = group(1).backends
    with backend.busy():
        backend.saw_failure("ConnectError")
        stats = backend.stats()
    assert (stats.state, stats.detail, stats.in_flight, stats.requests, stats.failures) == ("down", "ConnectError", 1, 1, 1)
    with pytest.raises(AttributeError):
        stats.state = "ready"  # type: ignore[misc]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://h/path", "http://h:port", "http://h?x=1", ""])
def test_urls_that_are_no_engines_address(url: str) -> None:
    for setting, given in (("--decode", {"decode": (url,)}), ("--prefill", {"decode": ("http://d",), "prefill": (url,)})):
        with pytest.raises(ConfigurationError, match="http://HOST:PORT") as caught:
            RouterConfig(**given)  # type: ignore[arg-type]
        assert caught.value.setting == setting


def test_a_router_needs_a_decode_engine_a_known_policy_and_no_doubles() -> None:
    with pytest.raises(ConfigurationError, match="--decode"):
        RouterConfig(decode=())
    with pytest.raises(ConfigurationError, match="least_loaded"):
        RouterConfig(decode=("http://d",), policy="random")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="twice"):
        RouterConfig(decode=("http://d", "http://d"))


async def test_an_engine_whose_probes_fail_for_long_is_lost_until_it_is_heard_again() -> None:
    clock = Clock()
    (backend,) = group(1, clock=clock).backends
    waiting = backend.lost
    backend.saw_silence("timed out")
    clock.now += CONFIG.silence_timeout_s - 1
    backend.saw_silence("timed out")
    assert not waiting.done()
    clock.now += 1
    backend.saw_silence("timed out")
    assert waiting.done()
    assert backend.lost.done(), "a new request does not wait for it either"
    backend.saw_not_ready("asleep")
    assert not backend.lost.done()
    backend.saw_silence("timed out")
    assert not backend.lost.done(), "silence is counted anew"


def test_an_engine_that_has_failed_for_days_is_still_only_left_alone() -> None:
    clock = Clock()
    (backend,) = group(1, clock=clock).backends
    for _ in range(5000):
        backend.saw_failure("refused")
    assert backend.resting
    clock.now += CONFIG.max_backoff_s
    assert not backend.resting
