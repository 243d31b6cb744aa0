"""Tests that need an RDMA device: a real one, or Soft-RoCE in a virtual machine (``scripts/rdma-vm``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rdma_child import Child
from rdma_engines import Engines
from rdma_transports import RdmaTransport
from rdma_verbs import Verbs, build_verbs

HERE = Path(__file__).parent
DEVICES = Path("/sys/class/infiniband")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.rdma)


@pytest.fixture(scope="session", autouse=True)
def rdma_device() -> str:
    """Its name. In the machine made for these tests nothing may be missing: there a skip would hide that they did not run."""
    names = sorted(os.listdir(DEVICES)) if DEVICES.is_dir() else []
    if not names:
        assert "TORPOR_RDMA_VM" not in os.environ, "the machine has no RDMA device"
        pytest.skip("no RDMA device here; scripts/rdma-vm runs these tests in a virtual machine that has one")
    return names[0]


@pytest.fixture(scope="session")
def verbs_library(rdma_device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_verbs(tmp_path_factory.mktemp("verbs"))


@pytest.fixture
def verbs(verbs_library: Path, rdma_device: str) -> Iterator[Verbs]:
    with Verbs(verbs_library, rdma_device) as verbs:
        yield verbs


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Put every child in it: all are ended after the test."""
    made: list[Child] = []
    yield made
    for child in reversed(made):
        child.close()


@pytest.fixture
def engines(transport: RdmaTransport, children: list[Child], rdma_device: str, tmp_path: Path) -> Engines:
    """Of the ``transport`` that the test is parametrized with."""
    return Engines(transport, rdma_device, tmp_path, children)
