"""Everything here is marked ``gpu`` and skips, at set-up, where no GPU is. ``@pytest.mark.gpu(count=2)`` asks for two.

One command runs them: ``scripts/gpu --only tests``, or ``pytest -m gpu tests/gpu``. ``alone`` marks what compares the memory that
is free on the whole device: scripts/gpu runs nothing beside it on that GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import gpu_kit
import pytest

from torpor._native import Device
from torpor.memory import Memory, MemoryConfig

SLACK_BYTES = 256 << 20
"""Libraries load kernels and take workspaces on the way: torch takes 92 MiB for its first. What pools have is counted exactly."""
LEAKED: list[Memory] = []
"""Kept until the end: what their finalizers have to say would fall upon another test."""
STDERR = pytest.StashKey[int]()
DEFAULT_TIMEOUT_S = 120.0
HANG_S = 20.0
"""Between a test's timeout, which Python code hears, and the end of its process, which native code that hangs needs."""
LEFTOVERS = ("live_regions", "live_extents", "live_imports", "live_arenas", "mapped_bytes", "condemned_bytes", "committed_bytes")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        item.add_marker(pytest.mark.gpu)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``TESTS_SHARD=2/3``: the second of three processes that share the tests, each with every third."""
    number, _, count = os.environ.get("TESTS_SHARD", "1/1").partition("/")
    kept = items[int(number) - 1 :: int(count)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # the real one: nothing is captured yet


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    counts = [marker.kwargs.get("count", 1) for marker in item.iter_markers("gpu")]
    if reason := gpu_kit.why_not(max(counts, default=1)):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with _watched(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _watched(item):  # pytest ends any such watch when a test fails
        return (yield)


@contextlib.contextmanager
def _watched(item: pytest.Item) -> Iterator[None]:
    """A hang that no signal reaches ends the process, with the stacks of all threads on standard error."""
    faulthandler.dump_traceback_later(_timeout_s(item) + HANG_S, exit=True, file=item.config.stash[STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _timeout_s(item: pytest.Item) -> float:
    """Its mark's, else what pytest-timeout goes by: the environment, then the ini file."""
    marker = item.get_closest_marker("timeout")
    given = [*marker.args, *marker.kwargs.values()] if marker else []
    if not given:
        with contextlib.suppress(ValueError, KeyError):  # the plugin that knows it is not there
            given = [os.environ.get("PYTEST_TIMEOUT") or item.config.getini("timeout")]
    return float(given[0]) if given and given[0] else DEFAULT_TIMEOUT_S


@pytest.fixture(autouse=True)
def blind_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed assertion must not read sleeping memory."""
    if torch := sys.modules.get("torch"):
        monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)


class OpenMemory(Protocol):
    def __call__(self, *, faults: bool = False, **settings: Any) -> Memory: ...


@pytest.fixture
def open_cuda_memory() -> Iterator[OpenMemory]:
    """Opens a Memory on the cuda driver with these settings of ``MemoryConfig``; ``faults``: its device takes ``arm_fault``.

    All of them are closed at the end of the test, which fails when native resources or device memory are left.
    """
    import torch

    torch.cuda.init()
    opened: list[tuple[Memory, bool]] = []

    def open_one(*, faults: bool = False, **settings: Any) -> Memory:
        config = MemoryConfig(**{"driver": "cuda", **settings})
        memory = Memory(config, device=Device.open(config.driver, config.device, faults=faults))
        opened.append((memory, faults))
        return memory

    before = _settled_bytes()
    yield open_one
    _forget_failures()
    left = [text for memory, faults in opened if (text := _close(memory, faults))]
    assert not left, left
    grown = _settled_bytes() - before
    assert grown < SLACK_BYTES, f"{grown} bytes of device memory are left"


@pytest.fixture
def cuda_memory(open_cuda_memory: OpenMemory) -> Memory:
    """A Memory on GPU 0 with the default settings; closed, and checked for leaks, at the end of the test."""
    return open_cuda_memory()


def _forget_failures() -> None:
    """A test that failed lives on in its traceback, and its tensors with it: then nothing could be closed."""
    for name in ("last_exc", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    gc.collect()


def _close(memory: Memory, faults: bool) -> str:
    """What is left on its device, in words; nothing when that could be closed."""
    device = memory.device
    if device.closed:
        return ""
    if faults:
        device.clear_faults()
    memory.close()
    stats = device.stats()
    left = {name: value for name in LEFTOVERS if (value := getattr(stats, name))}
    if left:
        LEAKED.append(memory)
        return f"{device} still has {left}"
    device.close()
    return ""


def _settled_bytes() -> int:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return gpu_kit.device_bytes()


@pytest.fixture
def device_bytes() -> Callable[..., int]:
    """``device_bytes(pid=None, ordinal=0)``: what a process holds of a GPU; see ``gpu_kit.device_bytes`` for what that means."""
    return gpu_kit.device_bytes


@pytest.fixture
def second_process() -> Iterator[Callable[..., gpu_kit.Child]]:
    """``second_process(function, *arguments)``: ``function(parent, *arguments)`` in a process of its own; killed at the end."""
    children: list[gpu_kit.Child] = []

    def start(function: Callable[..., None], *arguments: Any) -> gpu_kit.Child:
        children.append(gpu_kit.Child(function, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.kill()


def pytest_report_header() -> str:
    found = gpu_kit.gpus()
    return f"gpus: {found.count or found.why_not}"
