"""The conformance suite over verbs: what ``torpor check-connector`` looks at, where a registration pins pages and keeps them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rdma_child import Child
from rdma_transports import MOONCAKE, NIXL, TRANSPORTS, RdmaTransport

from torpor.testing.connectors import ITEMS, Subject, chosen
from torpor.testing.connectors.stage import Workers
from torpor.testing.connectors.suite import run_item

# Every limit of the suite's times this. Emulated, an agent takes a second instead of 60 ms, and an import 30 s instead of 2.
PATIENCE = 5.0
WITHIN_S = 900.0  # whatever an item's own limit is
EVERY_DAY = ("follow", "late read")  # over NIXL. The rest is for those who have ten minutes
pytestmark = pytest.mark.timeout(1200)


class Suite:
    """In a process of its own, since engines of it load what must not be loaded before a fork. Others of its processes live as
    long, and serve one item after another."""

    def __init__(self, transport: RdmaTransport, device: str, folder: Path) -> None:
        options = transport.settings(device, folder)
        extra = options.pop("extra")
        self._subjects = {
            connector: Subject.of(connector, extra=extra, settings=options, patience=PATIENCE)
            for connector in (transport.connector, transport.unfollowed)
        }
        self._workers = Workers(PATIENCE)

    def run(self, connector: str, item: str) -> tuple[str, str]:
        """The outcome's status and reason."""
        (found,) = chosen([item])
        outcome = run_item(self._subjects[connector], found, self._workers)
        return outcome.status.value, outcome.reason

    def close(self) -> None:
        self._workers.close()


@pytest.fixture(scope="module")
def suites(rdma_device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The suite of a transport, once for all its items."""
    made: dict[str, Child] = {}

    def suite_of(transport: RdmaTransport) -> Child:
        if transport.connector not in made:
            folder = tmp_path_factory.mktemp(transport.connector)
            transport.settings(rdma_device, folder)  # skips here
            made[transport.connector] = Child(functools.partial(Suite, transport, rdma_device, folder))
        return made[transport.connector]

    yield suite_of
    for child in made.values():
        child.close()


def _cases() -> list[Any]:
    every_day = {(NIXL, name) for name in EVERY_DAY}
    return [
        pytest.param(
            transport,
            item.name,
            id=f"{transport.connector}-{item.name}",
            marks=[] if (transport, item.name) in every_day else [pytest.mark.slow],
        )
        for transport in TRANSPORTS
        for item in ITEMS
    ]


@pytest.mark.parametrize(("transport", "item"), _cases())
def test_it_conforms(suites: Any, transport: RdmaTransport, item: str) -> None:
    status, reason = suites(transport).call("run", transport.connector, item, limit_s=WITHIN_S)
    assert status == "passed", reason


@pytest.mark.parametrize(
    "transport", [NIXL, pytest.param(MOONCAKE, marks=pytest.mark.slow)], ids=lambda transport: transport.connector
)
def test_p4a_a_registration_that_does_not_follow_is_caught(suites: Any, transport: RdmaTransport) -> None:
    status, reason = suites(transport).call("run", transport.unfollowed, "follow", limit_s=WITHIN_S)
    assert status == "failed"
    assert "are still held after P slept (P4a)" in reason
