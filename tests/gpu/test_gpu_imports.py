"""Device memory of one process in another: what an import is worth, and what it costs. Bytes of the device are everybody's."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from torpor._native import Device
from torpor.errors import TorporError
from torpor.memory import Memory, MemoryConfig

pytestmark = pytest.mark.gpu

NBYTES = 256 << 20
SLACK_BYTES = 8 << 20


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_what_is_no_extent_cannot_be_imported() -> None:
    with contextlib.closing(Device.open("cuda")) as device:
        fd = os.memfd_create("not an extent")
        os.ftruncate(fd, device.granularity)
        try:
            with pytest.raises(TorporError):
                device.import_extents([fd], [device.granularity])
        finally:
            os.close(fd)
        assert device.stats().live_imports == 0


@pytest.fixture
def target() -> torch.Tensor:
    return torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")


def test_an_import_outlives_what_its_owner_does(target: torch.Tensor) -> None:
    """The fact that connectors rest on: the owner unmaps, the importer reads the old bytes and keeps them from the device."""
    config = MemoryConfig(driver="cuda", extent_bytes=32 << 20)
    with Memory(config) as owner, contextlib.closing(Device.open("cuda")) as reader:
        tensor = owner.pool("kv_cache", policy="discard", exportable=True).empty((NBYTES,), torch.uint8).fill_(7)
        torch.cuda.synchronize()
        with owner.exports("kv_cache") as exported:
            (region,) = exported.regions
            imported = reader.import_extents(region.fds, region.extents)
        before = used_bytes()
        owner.sleep()
        assert abs(used_bytes() - before) < SLACK_BYTES
        reader.copy("device", [(target.data_ptr(), imported.address, NBYTES)])
        imported.close()
        assert before - used_bytes() >= NBYTES
        assert bool((target == 7).all())
        owner.wake()
        del tensor


def test_an_open_descriptor_alone_holds_the_memory(target: torch.Tensor) -> None:
    """Who was sent descriptors can import them after the sleep: they must be closed by all, not only the imports."""
    config = MemoryConfig(driver="cuda", extent_bytes=32 << 20)
    with Memory(config) as owner, contextlib.closing(Device.open("cuda")) as reader:
        tensor = owner.pool("kv_cache", policy="discard", exportable=True).empty((NBYTES,), torch.uint8).fill_(7)
        torch.cuda.synchronize()
        with owner.exports("kv_cache") as exported:
            (region,) = exported.regions
            before = used_bytes()
            owner.sleep()
            assert abs(used_bytes() - before) < SLACK_BYTES
            imported = reader.import_extents(region.fds, region.extents)
            reader.copy("device", [(target.data_ptr(), imported.address, NBYTES)])
            imported.close()
        assert before - used_bytes() >= NBYTES
        assert bool((target == 7).all())
        owner.wake()
        del tensor
