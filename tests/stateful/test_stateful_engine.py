"""A bounded share of the state machines; scripts/stateful runs many more."""

from __future__ import annotations

import pytest
from engine_machine import EngineMachine
from hypothesis import HealthCheck, settings

EngineMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestEngineMachine = EngineMachine.TestCase


def test_what_a_check_finds_at_the_end_of_a_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a callback of a future, which logs what is raised there, and goes on."""
    machine = EngineMachine()
    machine.start(num_blocks=8, budget=8, seats=2, while_asleep="reject", caching=True, connected=False)
    monkeypatch.setattr(machine, "call_ended", lambda call: 1 // 0)
    machine.pause("keep", "its end")
    with pytest.raises(ZeroDivisionError):
        machine.everything_agrees()
    with pytest.raises(ZeroDivisionError):
        machine.teardown()


def test_m9_calls_that_ask_for_the_same_are_predicted() -> None:
    """A release that joins another shares its report; a level after the same policies has nothing to do."""
    machine = EngineMachine()
    machine.start(num_blocks=8, budget=8, seats=2, while_asleep="reject", caching=True, connected=False)
    machine.release("nothing")
    machine.release("its end")
    machine.everything_agrees()
    machine.wake(None, "its end")
    machine.sleep(1, {"weights": "host", "runtime": "host", "kv_cache": "discard"}, "wait", None, "its end")
    machine.sleep(1, None, "wait", None, "its end")
    machine.everything_agrees()
    assert [bool(call.report["noop"]) for call in machine.calls] == [False, False, False, False, True]
    machine.teardown()
