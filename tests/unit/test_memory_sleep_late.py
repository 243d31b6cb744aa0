"""What goes wrong around the unmap of a sleep: before it nothing has changed, after it the error says what is true (M11, M12)."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import warnings
from collections.abc import Iterator

import pytest
import torch
from leftovers import no_descriptors_left

from torpor._native import Arena, Device, Op
from torpor.errors import DeviceError
from torpor.memory import Content, Memory, MemoryConfig, Residency, holders
from torpor.testing.driver import Fault, nothing_leaks

MIB = 1 << 20
CONFIG = MemoryConfig(driver="host", extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)
ASLEEP = {"weights": "asleep", "kv_cache": "asleep"}


def filled(memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    weights = memory.pool("weights").empty(2 * MIB, torch.uint8).fill_(7)
    kv = memory.pool("kv_cache", policy="discard", exportable=True).zeros(MIB, torch.uint8)
    return weights, kv


def comes_back(memory: Memory, weights: torch.Tensor) -> bool:
    memory.wake()
    memory.check_integrity()
    return bool(weights.eq(7).all())


def test_an_image_that_cannot_be_dropped_after_the_unmap(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, kv = filled(memory)
    memory.prepare_images({"kv_cache": "host"}, fill=True)

    def fail(*arguments: object) -> None:
        raise DeviceError("the pages stay locked", operation="decommit", code=5)

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "decommit", fail)
        with pytest.raises(DeviceError, match=r"everything is unmapped.*stay locked") as caught:
            memory.sleep()
    assert caught.value.fields == {"operation": "decommit", "code": 5, "residency": ASLEEP}
    assert memory.stats().tag("kv_cache").content is Content.LOST
    report = memory.sleep()
    assert [(t.tag, t.noop) for t in report.tags] == [("weights", True), ("kv_cache", False)], "it goes on with what is left"
    assert memory.stats().tag("kv_cache").image_bytes == 0
    assert memory.sleep().noop
    assert comes_back(memory, weights)
    assert kv.numel()


def test_an_account_that_cannot_be_given_after_the_unmap(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, kv = filled(memory)
    memory.exports("kv_cache").close()

    def fail() -> list[int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(holders, "processes", fail)
        with pytest.raises(DeviceError, match="everything is unmapped") as caught:
            memory.sleep()
    assert caught.value.fields == {"operation": "account", "code": errno.EMFILE, "residency": ASLEEP}
    assert memory.sleep().noop
    assert comes_back(memory, weights)
    assert kv.numel()


@pytest.fixture
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # none is free below the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for fd in taken:
        os.close(fd)


def test_without_a_descriptor_nothing_is_unmapped(memory: Memory, request: pytest.FixtureRequest) -> None:
    weights, kv = filled(memory)
    calls: list[str] = []
    memory.register_tag_hooks("weights", lambda: calls.append("let go"), lambda: calls.append("back"))
    memory.prepare_images(fill=True)
    request.getfixturevalue("no_descriptor_left")
    with pytest.raises(DeviceError, match="pinned") as caught:
        memory.sleep()
    assert caught.value.fields["operation"] == "pins"
    assert "residency" not in caught.value.fields
    states = [(t.residency, t.content) for t in memory.stats().tags]
    assert states == [(Residency.RESIDENT, Content.VALID)] * 2
    assert (weights.eq(7).all(), calls) == (True, ["let go", "back"])
    assert kv.numel()


@contextlib.contextmanager
def forked_child() -> Iterator[int]:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:  # holds what it inherited until told
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    yield child
    os.close(writing)
    os.waitpid(child, 0)


def test_m11_what_a_child_inherited_is_not_back_beside_a_grant_that_cannot_be_looked_into() -> None:
    with nothing_leaks(), no_descriptors_left(), Device.open("host") as device, Memory(CONFIG, device=device) as memory:
        pool = memory.pool("kv_cache", policy="discard", exportable=True)
        exported = pool.zeros(2 * MIB, torch.uint8)
        memory.export_ledger.grant("far away", "kv_cache")
        memory.exports("kv_cache").close()
        inherited = pool.zeros(4 * MIB, torch.uint8)
        with forked_child() as child:
            report = memory.sleep().tags[0]
        assert (report.unmapped_bytes, report.returned_bytes) == (6 * MIB, 0)
        assert {h.bytes for h in report.holders} == {2 * MIB, 6 * MIB}
        assert any(h.who.startswith(f"process {child} ") for h in report.holders)
        del exported, inherited


def test_m11_who_holds_what_went_before_the_unmap_stopped() -> None:
    with nothing_leaks(), Device.open("host", faults=True) as device, Memory(CONFIG, device=device) as memory:
        pool = memory.pool("kv_cache", policy="discard", exportable=True)
        tensors = [pool.zeros(2 * MIB, torch.uint8) for _ in range(2)]
        with memory.exports("kv_cache"), Fault(device, Op.UNMAP, 2), pytest.raises(DeviceError) as caught:
            memory.sleep()
        (holder,) = caught.value.holders["kv_cache"]
        assert (caught.value.residency, holder.bytes) == ({"kv_cache": "partial"}, 2 * MIB)
        memory.sleep()
        tensors.clear()
