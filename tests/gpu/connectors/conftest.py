"""Engines whose KV caches lie in device memory: two processes on one GPU, and on two where there are two."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_kit
import pytest
from connector_kit import LARGE, meet, on
from kv_child import SPARES, Child
from kv_meeting import Meeting, lying_readers


@pytest.fixture(autouse=True, scope="module")
def spares() -> Iterator[None]:
    SPARES.keep(0 if gpu_kit.why_not() else 4)
    yield
    SPARES.keep(0)


@pytest.fixture(params=["ipc", "nixl"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meeting]:
    with contextlib.closing(meet(request.param, tmp_path)) as meeting:
        yield meeting


@pytest.fixture
def ipc(tmp_path: Path) -> Iterator[Meeting]:
    with contextlib.closing(meet("ipc", tmp_path)) as meeting:
        yield meeting


@pytest.fixture
def nixl(tmp_path: Path) -> Iterator[Meeting]:
    with contextlib.closing(meet("nixl", tmp_path)) as meeting:
        yield meeting


@pytest.fixture(params=["ipc", "nixl"])
def large(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meeting]:
    """Caches whose coming and going shows on the device."""
    with contextlib.closing(meet(request.param, tmp_path, LARGE)) as meeting:
        yield meeting


@pytest.fixture(params=["ipc", "nixl"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """As the tests of processes on the host have it, with their small caches."""
    with contextlib.closing(Meeting(request.param, tmp_path, memory=on())) as meeting:

        def start(engine_id: str, role: str, **settings: Any) -> Child:
            return meeting.child(engine_id, role, **settings)

        start.connector = meeting.connector  # type: ignore[attr-defined]
        yield start


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    with lying_readers(monkeypatch) as ended:
        yield ended
