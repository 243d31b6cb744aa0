"""The conformance suite with KV caches in device memory: every item by itself, so that one that fails hides no other."""

from __future__ import annotations

import pytest

from torpor.memory import MemoryConfig
from torpor.testing.connectors import ITEMS, Item, Status, Subject, run_items

pytestmark = pytest.mark.gpu

# The driver's own granularity is 2 MiB.
MEMORY = MemoryConfig(driver="cuda", extent_bytes=2 << 20)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_ipc_conforms(item: Item) -> None:
    (outcome,) = run_items(Subject.of("ipc", memory=MEMORY), [item])
    fast = outcome.status is Status.NOT_APPLICABLE and item.name == "in-flight read"  # every read had ended: some tens of us
    assert fast or outcome.status is Status.PASSED, outcome.reason
