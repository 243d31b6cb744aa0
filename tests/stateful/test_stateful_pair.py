"""A bounded share of the state machines; scripts/stateful runs many more."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from pair_machine import IpcPair, NixlPair

# The connectors' threads are real: a failure may not repeat, and is no less one. Nothing is shrunk here: a history that waits in
# vain takes half a minute each time.
IpcPair.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
NixlPair.TestCase.settings = settings(IpcPair.TestCase.settings, max_examples=4)


class TestIpcPair(IpcPair.TestCase):
    pass


@pytest.mark.timeout(240)
class TestNixlPair(NixlPair.TestCase):
    pass
