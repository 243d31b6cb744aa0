"""A bounded share of the state machines; scripts/stateful runs many more."""

from __future__ import annotations

from engine_machine import EngineMachine
from hypothesis import HealthCheck, settings

EngineMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestEngineMachine = EngineMachine.TestCase
