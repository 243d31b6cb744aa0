"""Where no GPU is, kernels written in Triton run under its interpreter: that must be said before anything imports triton. And the
memory that most tests of it use."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from torpor._native import Device
from torpor.memory import Memory
from torpor.testing.driver import nothing_leaks


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT is heard here and by what is started. A shell's background job ignores it, and so does all that comes of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def device() -> Iterator[Device]:
    """The host's, with fault points. The test that leaves something on it, or mapped, fails."""
    with nothing_leaks(), Device.open("host", faults=True) as d:
        yield d
        if d.stats().live_regions:
            gc.collect()  # caught exceptions keep the test's tensors


@pytest.fixture
def memory(device: Device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """On that device, with the module's ``CONFIG``."""
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
    with Memory(request.module.CONFIG, device=device) as m:
        yield m
