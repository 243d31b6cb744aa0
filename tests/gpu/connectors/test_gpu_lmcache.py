"""LMCache's P/D mode with KV caches in device memory, and its staging buffer in host memory or on the same GPU."""

from __future__ import annotations

from typing import Any

import connector_kit  # noqa: F401 (the path of the module below)
import pytest
from lmcache_pairs import PAIR_ITEMS, free_peer

from torpor.memory import MemoryConfig
from torpor.testing.connectors import Status, Subject
from torpor.testing.connectors.stage import workers
from torpor.testing.connectors.suite import chosen, run_item
from torpor.testing.kv_engine import missing_package

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]

MEMORY = MemoryConfig(driver="cuda", extent_bytes=2 << 20)  # the driver's own granularity


@pytest.fixture(params=["cpu", "cuda"])
def pair_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    for package in ("lmcache", "nixl"):
        if missing := missing_package(package):
            pytest.skip(missing)
    return {"pd_peer": free_peer(), "pd_buffer_bytes": 48 << 20, "pd_buffer_device": request.param}


@pytest.mark.parametrize("item", PAIR_ITEMS)
def test_the_pd_mode_conforms(item: str, pair_options: dict[str, Any]) -> None:
    with workers() as processes:
        outcome = run_item(Subject.of("lmcache", extra=pair_options, memory=MEMORY), chosen([item])[0], processes)
    assert outcome.status is Status.PASSED, outcome.reason
