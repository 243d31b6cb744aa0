"""The GPU tests' own tools: what they say of a device is so, and a second process answers or says why not."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from gpu_kit import Child, ChildDied, Parent, per_process

from torpor.memory import Memory

MIB = 1 << 20


def test_a_pool_counts_as_memory_of_this_process(cuda_memory: Memory, device_bytes: Callable[..., int]) -> None:
    """M11: what a sleep reports as given back is what this process holds less."""
    torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")  # its kernel is loaded from now on
    torch.cuda.synchronize()
    empty = device_bytes()
    tensor = cuda_memory.pool("kv", policy="discard").zeros((256 * MIB,), torch.uint8)
    assert device_bytes() - empty == pytest.approx(tensor.nbytes, abs=8 * MIB)
    report = cuda_memory.sleep()
    assert (report.unmapped_bytes, report.returned_bytes) == (tensor.nbytes, tensor.nbytes)
    assert device_bytes() - empty == pytest.approx(0, abs=8 * MIB)


def _allocate(parent: Parent, nbytes: int) -> None:
    tensor = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    parent.send(os.getpid())
    parent.recv()
    del tensor


def test_memory_of_another_process_is_not_ours(second_process: Callable[..., Child], device_bytes: Callable[..., int]) -> None:
    if not per_process():
        pytest.skip("NVML does not tell processes apart here")
    ours = device_bytes()
    child = second_process(_allocate, 512 * MIB)
    assert child.recv() == child.pid
    assert device_bytes() == ours
    assert device_bytes(child.pid) > 512 * MIB
    child.send("done")
    child.close()


def _write_to(parent: Parent) -> None:
    for fd in parent.recv_fds():
        os.write(fd, b"here")
        os.close(fd)
    raise RuntimeError("and then it failed")


def test_descriptors_and_failures_cross(second_process: Callable[..., Child]) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as pipe:
        child = second_process(_write_to)
        child.send_fds([write])
        os.close(write)
        assert pipe.read() == b"here"
        with pytest.raises(ChildDied, match="and then it failed"):
            child.recv()
