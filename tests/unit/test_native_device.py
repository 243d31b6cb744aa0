"""The native core through its binding: M1, M5, M12 as far as the core carries them, P4's guard, exports and imports, errors."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from torpor._native import Device, Op, Region, buffer_at
from torpor.errors import ConfigurationError, DeviceError, DeviceMemoryError, HostMemoryError, StateError

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[Device]:
    """Fails the test that leaves something on its device: a device with anything live refuses to close."""
    device = Device.open("host", faults=True)
    yield device
    device.clear_faults()
    device.close()


def view(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(buffer_at(address, nbytes), dtype=np.uint8)


def fill(region: Region, seed: int) -> np.ndarray:
    data = np.random.default_rng(seed).integers(0, 256, region.nbytes, dtype=np.uint8)
    view(region.address, region.nbytes)[:] = data
    return data


def test_content_survives_a_trip_to_the_host_at_the_same_address(device: Device) -> None:
    with device.create_region(3 * MIB, extent_bytes=MIB, name="weights") as region, device.create_arena(16 * MIB) as arena:
        address, data = region.address, fill(region, 1)
        arena.commit(0, region.nbytes, threads=2)
        device.copy("to_host", [(arena.address, region.address, region.nbytes)], threads=2)
        before = device.hash_chunks(region.address, region.nbytes, MIB // 2)
        assert (device.hash_chunks(arena.address, region.nbytes, MIB // 2, on_host=True) == before).all()
        device.unmap([region])
        assert not region.mapped
        assert region.extents() == ()
        device.map([region])
        assert region.address == address
        device.copy("to_device", np.array([[region.address, arena.address, region.nbytes]], dtype=np.uint64))
        assert (view(region.address, region.nbytes) == data).all()
        assert (device.hash_chunks(region.address, region.nbytes, MIB // 2) == before).all()


def test_stats_count_what_is_there(device: Device) -> None:
    empty = device.stats()
    region = device.create_region(5 * PAGE, extent_bytes=2 * PAGE)
    arena = device.create_arena(MIB)
    arena.commit(0, 3 * PAGE)
    stats = device.stats()
    assert (stats.live_regions, stats.live_extents, stats.live_arenas) == (1, 3, 1)
    assert (stats.reserved_bytes, stats.mapped_bytes, stats.committed_bytes) == (5 * PAGE, 5 * PAGE, 3 * PAGE)
    device.unmap([region])
    assert (device.stats().mapped_bytes, device.stats().reserved_bytes) == (0, 5 * PAGE)
    region.destroy()
    region.destroy()
    arena.close()
    arena.close()
    assert device.stats() == empty


def test_extents_are_named_as_the_kernel_names_them(device: Device) -> None:
    with device.create_region(4 * PAGE, extent_bytes=2 * PAGE, exportable=True) as region:
        fds = region.export()
        try:
            for fd, extent in zip(fds, region.extents(), strict=True):
                status = os.fstat(fd)
                assert (status.st_dev, status.st_ino, status.st_size) == (extent.device_id, extent.inode, extent.nbytes)
                assert status.st_blocks * 512 == extent.nbytes  # the pages are there, not only promised
                assert not os.get_inheritable(fd)
        finally:
            for fd in fds:
                os.close(fd)


def test_import_keeps_the_old_pages_after_the_owner_let_go(device: Device) -> None:
    region = device.create_region(2 * PAGE, extent_bytes=PAGE, exportable=True, guarded=True)
    data = fill(region, 2)
    fds = region.export()
    imported = device.import_extents(fds, [PAGE, PAGE])
    for fd in fds:
        os.close(fd)
    device.unmap([region])
    assert not view(region.address, region.nbytes).any()  # the guard
    assert (view(imported.address, imported.nbytes) == data).all()
    device.map([region])
    assert (view(imported.address, imported.nbytes) == data).all()
    imported.close()
    region.destroy()


def test_import_refuses_what_is_no_extent(device: Device) -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, PAGE)
    with pytest.raises(ConfigurationError, match="not sealed"):
        device.import_extents([fd], [PAGE])
    with pytest.raises(ConfigurationError, match="has 4096 bytes"):
        device.import_extents([fd], [16 * PAGE])
    os.close(fd)
    with pytest.raises(DeviceError) as caught:
        device.import_extents([fd], [PAGE])
    assert caught.value.operation == "import"
    with pytest.raises(ConfigurationError, match="1 descriptors, but 2 sizes"):
        device.import_extents([fd], [PAGE, PAGE])


def test_copy_blocks_takes_lists_and_arrays(device: Device) -> None:
    with (
        device.create_region(64 * PAGE, extent_bytes=16 * PAGE) as src,
        device.create_region(64 * PAGE, extent_bytes=PAGE) as dst,
    ):
        data = fill(src, 3).reshape(64, PAGE)
        view(dst.address, dst.nbytes)[:] = 0
        device.copy_blocks(dst.address, src.address, PAGE, [0, 5, 6, 63], np.array([9, 1, 2, 0]), threads=2)
        out = view(dst.address, dst.nbytes).reshape(64, PAGE)
        expected = np.zeros_like(data)
        expected[[0, 5, 6, 63]] = data[[9, 1, 2, 0]]
        assert (out == expected).all()
        with pytest.raises(ConfigurationError, match="2 destination blocks, but 1 source"):
            device.copy_blocks(dst.address, src.address, PAGE, [0, 1], [0])
        with pytest.raises(ConfigurationError, match="dst_ids"):
            device.copy_blocks(dst.address, src.address, PAGE, [-1], [0])


def test_what_sleeps_cannot_be_copied(device: Device) -> None:
    with device.create_region(PAGE, extent_bytes=PAGE, name="kv_cache") as region:
        device.unmap([region])
        target = np.empty(PAGE, dtype=np.uint8)
        with pytest.raises(StateError, match="kv_cache"):
            device.copy("to_host", [(target.ctypes.data, region.address, PAGE)])
        with pytest.raises(StateError, match="kv_cache"):
            device.hash_chunks(region.address, PAGE, PAGE)
        with pytest.raises(StateError, match="EXPORTABLE"):
            region.export()


def test_failed_map_leaves_everything_asleep_and_can_be_repeated(device: Device) -> None:
    first = device.create_region(3 * PAGE, extent_bytes=PAGE)
    second = device.create_region(2 * PAGE, extent_bytes=PAGE)
    device.unmap([first, second])
    maps = device.fault_calls(Op.MAP)
    device.arm_fault(Op.CREATE, 5)
    with pytest.raises(DeviceMemoryError) as caught:
        device.map([first, second])
    assert caught.value.bytes_needed == 5 * PAGE
    assert caught.value.bytes_free > 0
    assert device.fault_calls(Op.MAP) == maps
    assert (first.mapped, second.mapped) == (False, False)
    device.map([first, second])
    assert (first.mapped, second.mapped) == (True, True)
    first.destroy()
    second.destroy()


def test_failed_unmap_says_how_far_it_came(device: Device) -> None:
    regions = [device.create_region(PAGE, extent_bytes=PAGE) for _ in range(3)]
    device.arm_fault(Op.UNMAP, 2)
    with pytest.raises(DeviceError) as caught:
        device.unmap(regions)
    assert (caught.value.unmapped, caught.value.operation) == (1, "unmap")
    assert [region.mapped for region in regions] == [False, True, True]
    device.unmap(regions)
    for region in regions:
        region.destroy()


def test_refused_release_is_condemned_and_tried_again(device: Device) -> None:
    region = device.create_region(4 * PAGE, extent_bytes=2 * PAGE)
    device.arm_fault(Op.RELEASE, 1)
    with pytest.raises(DeviceError):
        device.unmap([region])
    assert (region.mapped, region.condemned_bytes, device.stats().condemned_bytes) == (False, 2 * PAGE, 2 * PAGE)
    device.unmap([region])
    assert (region.condemned_bytes, device.stats().condemned_bytes) == (0, 0)
    region.destroy()


def test_memory_that_is_not_there_is_an_error_with_numbers(device: Device) -> None:
    much = 1 << 44
    with pytest.raises(DeviceMemoryError) as device_error:
        device.create_region(much, extent_bytes=much)
    assert device_error.value.bytes_needed == much > device_error.value.bytes_free > 0
    with device.create_arena(much) as arena, pytest.raises(HostMemoryError) as host_error:
        arena.commit(0, much)
    assert host_error.value.bytes_needed == much > host_error.value.bytes_free > 0


def test_bad_arguments_name_themselves(device: Device) -> None:
    with pytest.raises(ConfigurationError, match="unknown driver 'rocm'"):
        Device.open("rocm")
    with pytest.raises(ConfigurationError, match="device 3"):
        Device.open("host", 3)
    with pytest.raises(ConfigurationError, match="nbytes is -1"):
        device.create_region(-1, extent_bytes=PAGE)
    with pytest.raises(ConfigurationError, match="extent_bytes is 0"):
        device.create_region(1, extent_bytes=0)
    with pytest.raises(ConfigurationError, match="unknown copy kind 'sideways'"):
        device.copy("sideways", [])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="multiple of 8"):
        device.hash_chunks(PAGE, 8, 12, on_host=True)


def test_closed_objects_say_so() -> None:
    device = Device.open("host")
    region = device.create_region(PAGE, extent_bytes=PAGE)
    with pytest.raises(StateError, match="1 regions"):
        device.close()
    assert region.mapped  # the refused close changed nothing
    with pytest.raises(ConfigurationError, match="TP_DEVICE_FAULTS"):
        device.arm_fault(Op.MAP, 1)
    region.destroy()
    with pytest.raises(StateError, match="region is closed"):
        _ = region.mapped
    device.close()
    device.close()
    with pytest.raises(StateError, match="device is closed"):
        device.stats()


def test_forgotten_device_warns() -> None:
    def forget() -> int:
        return Device.open("host").handle

    with pytest.warns(ResourceWarning, match="a device was never closed"):
        handle = forget()
    Device(handle, "host").close()


def test_buffer_can_be_watched_and_keeps_nothing_alive(device: Device) -> None:
    with device.create_region(PAGE, extent_bytes=PAGE) as region:
        gone: list[int] = []
        buffer = buffer_at(region.address, PAGE)
        weakref.finalize(buffer, gone.append, 1)
        array = np.frombuffer(buffer, dtype=np.uint8)
        del buffer
        assert gone == []
        array[0] = 5
        assert view(region.address, 1)[0] == 5
        del array
        gc.collect()
        assert gone == [1]


def test_hash_is_the_documented_one(device: Device) -> None:
    """Written again from the text of hash.h, so that a kernel written from it will agree."""
    mask = (1 << 64) - 1
    g, k, m = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x9E3779B1
    data = np.random.default_rng(4).integers(0, 256, 4 * PAGE - 3, dtype=np.uint8)
    raw, chunk = data.tobytes(), 1024
    expected = []
    for start in range(0, len(raw), chunk):
        part = raw[start : start + chunk]
        total = 0
        for i in range(-(-len(part) // 8)):
            x = int.from_bytes(part[8 * i : 8 * i + 8], "little") ^ ((k + i * g) & mask)
            x = ((x ^ (x >> 32)) * m) & mask
            z = x ^ (x >> 32)
            total += z * (2 * z + 1)
        v = (total + len(part) * g) & mask
        v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & mask
        v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & mask
        expected.append(v ^ (v >> 31))
    assert device.hash_chunks(data.ctypes.data, data.size, chunk, on_host=True, threads=2).tolist() == expected
