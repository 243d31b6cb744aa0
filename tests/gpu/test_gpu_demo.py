"""``torpor demo`` with real engines on a GPU, and the fault it exists to show. A small random model; a minute each."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from torpor.demo import DemoConfig, run_demo, run_unfollowed

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


CONFIG = DemoConfig(connectors=("ipc",), cycles=1, model="random", memory_driver="cuda")


def test_a_pair_sleeps_and_wakes_and_answers_to_the_byte(console: Console) -> None:
    assert run_demo(CONFIG, console), said(console)
    assert "device memory of one host" in said(console)


def test_registrations_that_do_not_follow_show_the_fault(console: Console) -> None:
    assert run_unfollowed(CONFIG, console), said(console)
    assert "the sleep report names peer" in said(console)
    assert "in use on P's GPU" in said(console)
