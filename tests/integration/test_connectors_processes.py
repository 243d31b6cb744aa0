"""P1-P5 between engines that are processes: they sleep, stop, die and come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kv_child import Child, ChildError

from torpor.testing.kv_engine import missing_package

pytestmark = pytest.mark.integration

A = list(range(100, 110))
B = list(range(200, 210))
Start = Callable[..., Child]


@pytest.fixture(params=["ipc", "nixl", "nixl over tcp", "mooncake"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts a child engine: ``start(engine_id, role, **settings)``."""
    connector, _, tls = request.param.partition(" over ")
    if missing := missing_package(connector):
        pytest.skip(missing)

    with ExitStack() as children:

        def start(engine_id: str, role: str, **settings: Any) -> Child:
            extra = ({"ucx_tls": tls} if tls else {}) | settings.pop("extra", {})
            return children.enter_context(Child(connector, engine_id, role, tmp_path, extra=extra, **settings))

        start.connector = connector  # type: ignore[attr-defined]
        yield start


def read(p: Child, d: Child, name: str, prompt: list[int], there: list[int], here: list[int]) -> bool:
    """Whether D gets P's KV of this prompt, byte for byte."""
    params = p.call("prefill", name, prompt, there)
    return d.call("load", name, prompt, params, here) == "recving" and d.call("has", prompt, here)


def test_either_side_and_both_sleep_and_every_byte_is_right_afterwards(start: Start) -> None:
    p, d = start("P", "producer"), start("D", "consumer")
    assert read(p, d, "first", A, [1, 2, 3], [4, 5, 6])
    for cycle in range(2):
        for who in ([d], [p], [p, d], [d, p]):
            for engine in who:
                report = engine.call("sleep")
                assert report["held_bytes"] == 0, report
            for engine in who:
                engine.call("wake")
            name = f"{cycle} {len(who)} {who[0].pid}"
            prompt = [cycle, len(who), who[0].pid, *A[:7]]
            assert read(p, d, name, prompt, [3, 0, 5], [0, 7, 1])


def test_p2_a_reader_that_is_killed_holds_nothing_up(start: Start) -> None:
    p, d = start("P", "producer"), start("D", "consumer")
    assert read(p, d, "first", A, [1, 2, 3], [4, 5, 6])
    d.process.kill()
    begun = time.monotonic()
    assert p.call("sleep")["held_bytes"] == 0
    assert time.monotonic() - begun < 4
    p.call("wake")
    assert d.death() == -signal.SIGKILL
    again = start("D", "consumer")
    assert read(p, again, "second", B, [1, 2, 3], [4, 5, 6])


def test_p2_a_reader_that_is_stopped_is_met_by_the_deadline_by_name(start: Start) -> None:
    p, d = start("P", "producer", withdraw_timeout_s=0.5), start("D", "consumer")
    assert read(p, d, "first", A, [1, 2, 3], [4, 5, 6])
    d.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(ChildError, match=r"HookError.*PeerError: D \(.*withdraw_timeout_s"):
        p.call("sleep")
    assert time.monotonic() - begun < 3
    # Everybody else goes on, and nothing was unmapped.
    other = start("D2", "consumer")
    assert read(p, other, "second", B, [1, 2, 3], [4, 5, 6])
    d.send_signal(signal.SIGCONT)
    assert read(p, d, "third", [7, *A[:9]], [1, 2, 3], [4, 5, 6])
    assert p.call("sleep")["held_bytes"] == 0


def test_p5_an_owner_that_is_killed_costs_its_readers_a_load(start: Start) -> None:
    p, d = start("P", "producer"), start("D", "consumer")
    assert read(p, d, "first", A, [1, 2, 3], [4, 5, 6])
    old = p.call("prefill", "lost", B, [1, 2, 3])
    p.process.kill()
    p.death()
    assert d.call("load", "lost", B, old, [4, 5, 6]) == "failed"
    assert d.call("sleep")["held_bytes"] == 0
    d.call("wake")
    p = start("P", "producer")
    new = p.call("prefill", "kept", B, [1, 2, 3])
    assert d.call("load", "stale", B, old | {"remote_port": new["remote_port"]}, [4, 5, 6]) == "failed"
    assert d.call("load", "kept", B, new, [4, 5, 6]) == "recving"
    assert d.call("has", B, [4, 5, 6])


def test_p1_params_from_before_a_sleep_are_not_read_after_it(start: Start) -> None:
    p, d = start("P", "producer"), start("D", "consumer")
    assert read(p, d, "first", A, [1, 2, 3], [4, 5, 6])
    late = p.call("prefill", "late", B, [1, 2, 3])
    assert p.call("sleep")["held_bytes"] == 0
    begun = time.monotonic()
    assert d.call("load", "asleep", B, late, [4, 5, 6]) == "failed"
    assert time.monotonic() - begun < 4
    p.call("wake")
    p.call("prefill", "new", A, [1, 2, 3])
    assert d.call("load", "late", B, late, [4, 5, 6]) == "failed"
    assert p.process.poll() is None
    assert d.process.poll() is None


def test_an_owner_that_is_stopped_in_the_middle_costs_one_load(start: Start) -> None:
    """Over TCP its part of the read hangs; nothing of it may land when it goes on, and it must live."""
    p = start("P", "producer")
    d = start("D", "consumer", extra={"read_timeout_s": 0.5, "handshake_timeout_s": 1.0})
    assert read(p, d, "first", A, [1, 2, 3], [4, 5, 6])
    params = p.call("prefill", "second", B, [1, 2, 3])
    p.send_signal(signal.SIGSTOP)
    result = d.call("load", "second", B, params, [4, 5, 6])
    if result == "recving":
        assert d.call("has", B, [4, 5, 6]), "one-sided reads need nothing of the owner's process"
    assert d.call("sleep")["held_bytes"] == 0
    d.call("wake")
    before = d.call("block_sums")
    p.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert d.call("block_sums") == before, "bytes of a read that was given up landed in the KV cache"
    assert read(p, d, "third", [5, *A[:9]], [1, 2, 3], [4, 5, 6])
    assert p.call("sleep")["held_bytes"] == 0
