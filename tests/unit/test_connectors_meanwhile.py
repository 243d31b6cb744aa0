"""What was under way when an engine's own KV cache was released, and ends after it is back (P1, P2, P5)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_pairs import WAIT_S, A, B, Gate, Pairs

from torpor.connectors.ipc import IpcRemote
from torpor.errors import HookError
from torpor.testing.kv_engine import KVEngine

THERE, HERE = [1, 2, 3], [4, 5, 6]


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Pairs]:
    with contextlib.closing(Pairs("ipc", tmp_path)) as pairs:
        yield pairs


def idle(engine: KVEngine) -> None:
    worker: Any = engine.worker
    deadline = time.monotonic() + WAIT_S
    while any(puller.busy for puller in worker._reader._pullers.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_p5_a_handshake_from_before_an_update_of_the_weights_serves_nothing_after_it(pairs: Pairs) -> None:
    """It was made for the old weights, which the owner still has."""
    p, d = pairs.pair()
    gate, transport = Gate(), d.worker._transport  # type: ignore[attr-defined]
    transport.attach = gate.before(transport.attach)
    d.begin_load("q", A, p.prefill("r", A, THERE), HERE)
    assert gate.reached.wait(WAIT_S)
    d.cancel("q")
    assert d.wait("q") == "failed"
    d.sleep()
    d.set_weights_version("stand-in@2")
    d.wake()
    gate.open()
    idle(d)
    assert d.load("q2", B, p.prefill("r2", B, THERE), HERE) == "failed"
    assert not d.has(B, HERE)


def stubborn_imports(engine: KVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver does not let go of what it has imported, until ``monkeypatch`` is undone."""

    def refuse(self: Any, imported: Any) -> bool:
        return False

    monkeypatch.setattr(IpcRemote, "_dropped", refuse)


def test_p2_a_release_that_fails_at_the_reader_s_end_leaves_the_owner_serving(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (pairs.engine(name, withdraw_timeout_s=0.5) for name in "XY")
    assert x.load("q", A, y.prefill("r", A, THERE), HERE) == "recving"
    with monkeypatch.context() as driver:
        stubborn_imports(x, driver)
        with pytest.raises(HookError, match="cannot be let go of") as failed:
            x.sleep()
        assert not failed.value.fields.get("undo_failures")
        assert x.worker.epoch() is not None
        assert y.load("q2", B, x.prefill("r2", B, [0, 7, 1]), HERE) == "recving"
        assert y.has(B, HERE)
    x.sleep()
    x.wake()
    assert y.load("q3", B, x.prefill("r3", B, [0, 7, 1]), HERE) == "recving"


def test_p5_without_a_thread_for_a_peer_a_load_fails_and_the_engine_goes_on(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pairs.pair()
    plain = threading.Thread.start

    def none_left(self: threading.Thread) -> None:
        if self.name.startswith("torpor-kv-pull"):
            raise RuntimeError("can't start new thread")
        plain(self)

    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", none_left)
        assert d.load("q", A, p.prefill("r", A, THERE), HERE) == "failed"
    assert d.load("q2", A, p.prefill("r2", A, THERE), HERE) == "recving"
