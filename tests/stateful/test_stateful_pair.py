"""A bounded share of the state machines; scripts/stateful runs many more."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from pair_connectors import CONNECTORS
from pair_machine import PAIRS

# The connectors' threads are real: a failure may not repeat, and is no less one. Nothing is shrunk here: a history that waits in
# vain takes half a minute each time.
BOUNDED = settings(
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CONNECTORS)
def test_random_histories_of_a_pair(name: str) -> None:
    """Never a wrong token, a hang, or a block that leaks."""
    if CONNECTORS[name].package is not None:
        pytest.importorskip(CONNECTORS[name].package)
    run_state_machine_as_test(PAIRS[name], settings=settings(BOUNDED, max_examples=CONNECTORS[name].examples))


def test_a_call_that_never_returns_is_told_at_the_end_of_a_history() -> None:
    machine = PAIRS["ipc"]()
    machine.start(p_blocks=8, d_blocks=8, budget=8)
    machine.p.tickets.append(Future())
    with pytest.raises(AssertionError, match="a call hangs"):
        machine.teardown()
