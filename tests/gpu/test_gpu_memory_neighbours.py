"""M5 and M11 with other processes on the GPU: one that took the memory meanwhile, and one that kept what it was lent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from torpor._native import Device
from torpor.errors import DeviceMemoryError
from torpor.memory import Memory, MemoryConfig, Residency

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30

NEIGHBOUR = """
import sys
from torpor._native import Device
left = int(sys.argv[1])
device = Device.open("cuda")
region = device.create_region(device.free_bytes() - left, extent_bytes=1 << 28)
print("took", flush=True)
sys.stdin.readline()
region.destroy()
device.close()
print("gave", flush=True)
"""


@pytest.fixture
def memory() -> Iterator[Memory]:
    device = Device.open("cuda")
    with Memory(MemoryConfig(driver="cuda"), device=device) as m:
        yield m
    device.close()


def test_m5_a_neighbour_took_the_memory_and_the_retry_after_it_left_succeeds(memory: Memory) -> None:
    weights = memory.pool("weights").empty(2 * GIB, torch.uint8)
    weights.copy_(torch.arange(weights.numel(), device=weights.device, dtype=torch.int64).bitwise_and_(255))
    kv = memory.pool("kv_cache", policy="discard").empty(4 * GIB, torch.uint8)
    expected = weights[:: 4 * MIB + 1].clone()
    torch.cuda.empty_cache()
    memory.sleep()
    command = [sys.executable, "-c", NEIGHBOUR, str(3 * GIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdin is not None
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "took\n"
        with pytest.raises(DeviceMemoryError) as caught:
            memory.wake()
        assert caught.value.fields["bytes_needed"] == 6 * GIB
        assert 2 * GIB < caught.value.fields["bytes_free"] < 4 * GIB
        assert {t.residency for t in memory.stats().tags} == {Residency.ASLEEP}
        assert memory.stats().tag("weights").image_bytes == 2 * GIB
        memory.check_integrity()
        memory.wake(["weights"])  # for this there is room
        assert torch.equal(weights[:: 4 * MIB + 1], expected)
        memory.sleep({"weights": "host"})
        neighbour.stdin.write("go\n")
        neighbour.stdin.flush()
        assert neighbour.stdout.readline() == "gave\n"
    memory.wake()
    assert torch.equal(weights[:: 4 * MIB + 1], expected)
    assert kv.numel()
    del weights, kv
