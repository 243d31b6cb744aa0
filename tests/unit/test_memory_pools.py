"""Pools and tensors: M1 (addresses), M10 (freeing and allocating while asleep), lifetimes, settings, sub-allocation."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torpor.errors import ConfigurationError, StateError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.memory.layout import FreeList
from torpor.memory.procfs import read_mappings, resident_bytes
from torpor.testing.driver import nothing_leaks

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
    with nothing_leaks(), Memory(CONFIG) as m:
        yield m


def files_in(tensor: torch.Tensor) -> int:
    """Memory files that the kernel maps under the tensor."""
    start = tensor.data_ptr()
    return sum(bool(m.inode[1]) and m.start < start + tensor.nbytes and m.end > start for m in read_mappings())


def test_m1_addresses_stay_through_every_way_of_sleeping(memory: Memory) -> None:
    pool = memory.pool("weights")
    tensors = [pool.zeros(n, torch.uint8) for n in (1, 300, MIB, 3 * MIB)]
    addresses = [t.data_ptr() for t in tensors]
    for policy in ("host", "discard", "host", "host"):
        memory.sleep({"weights": policy})
        assert [files_in(t) for t in tensors] == [0, 0, 0, 0]
        memory.wake()
        memory.mark_valid("weights")
        assert [t.data_ptr() for t in tensors] == addresses
        assert all(files_in(t) for t in tensors)


def test_tensors_are_aligned_contiguous_writable_and_of_the_asked_type(memory: Memory) -> None:
    pool = memory.pool("weights")
    kept = []
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn):
        t = pool.empty((3, 5, 7), dtype)
        assert t.data_ptr() % 256 == 0
        assert t.is_contiguous()
        assert not t._is_view()
        assert (t.shape, t.dtype, t.device.type) == ((3, 5, 7), dtype, "cpu")
        assert memory.tag_of(t) == "weights"
        kept.append(t)
    kept[0].fill_(2.5)
    assert float(kept[0].sum()) == 2.5 * 105
    assert pool.empty(4).dtype is torch.get_default_dtype()
    assert pool.zeros(()).shape == ()


def test_no_two_tensors_overlap(memory: Memory) -> None:
    pool = memory.pool("weights")
    tensors = [pool.empty(1000 + 37 * i, torch.uint8) for i in range(60)]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_small_tensors_share_a_region_and_large_ones_have_their_own(memory: Memory) -> None:
    pool = memory.pool("weights")
    small = [pool.empty(100, torch.uint8) for _ in range(20)]
    assert pool.stats().regions == 1
    large = pool.empty(2 * MIB, torch.uint8)
    assert pool.stats().regions == 2
    before = pool.stats().resident_bytes
    del large
    memory.check_integrity()
    assert (pool.stats().regions, before - pool.stats().resident_bytes) == (1, 2 * MIB)
    assert len(small) == 20


def test_a_reserved_region_takes_the_tensors_to_come(memory: Memory) -> None:
    pool = memory.pool("weights")
    pool.reserve(8 * MIB)
    tensors = [pool.empty(MIB, torch.uint8) for _ in range(8)]
    assert pool.stats().regions == 1
    assert tensors[1].data_ptr() - tensors[0].data_ptr() == MIB
    with pytest.raises(ConfigurationError, match="reserve -1"):
        pool.reserve(-1)


def test_an_empty_tensor_lies_nowhere(memory: Memory) -> None:
    t = memory.pool("weights").empty((0, 4))
    assert t.shape == (0, 4)
    assert memory.tag_of(t) is None
    assert memory.pool("weights").stats().regions == 0


def test_memory_comes_back_when_the_last_view_of_a_storage_dies(memory: Memory) -> None:
    pool = memory.pool("weights")
    view = pool.zeros(2 * MIB, torch.uint8)[10:20]
    gc.collect()
    memory.check_integrity()
    assert pool.stats().allocated_bytes == 2 * MIB
    del view
    memory.check_integrity()
    assert (pool.stats().allocated_bytes, pool.stats().regions) == (0, 0)


def test_freed_space_is_used_again(memory: Memory) -> None:
    pool = memory.pool("weights")
    a, b, c = (pool.empty(1024, torch.uint8) for _ in range(3))
    hole = b.data_ptr()
    del b
    assert pool.empty(1024, torch.uint8).data_ptr() == hole
    assert a.data_ptr() < hole < c.data_ptr()


def test_m10_freeing_a_sleeping_tensor_frees_addresses_and_image_only(memory: Memory) -> None:
    pool = memory.pool("weights")
    keep, go = pool.zeros(MIB, torch.uint8), pool.zeros(2 * MIB, torch.uint8)
    keep.fill_(7)
    memory.sleep({"weights": "host"})
    assert pool.stats().image_bytes == 3 * MIB
    start = go.data_ptr()
    del go
    memory.check_integrity()
    stats = pool.stats()
    assert (stats.reserved_bytes, stats.image_bytes, stats.resident_bytes) == (MIB, MIB, 0)
    assert not [m for m in read_mappings() if m.start <= start < m.end]
    assert memory.stats().host_committed_bytes == MIB
    memory.wake()
    assert bool((keep == 7).all())


def test_m10_freeing_part_of_a_sleeping_region_frees_that_part_of_the_image(memory: Memory) -> None:
    pool = memory.pool("weights")
    pool.reserve(MIB)
    first, second = pool.zeros(MIB // 2, torch.uint8), pool.zeros(MIB // 2, torch.uint8)
    second.fill_(9)
    memory.sleep({"weights": "host"})
    del first
    memory.check_integrity()
    assert pool.stats().image_bytes == MIB // 2
    assert memory.wake().tags[0].restored_bytes == MIB // 2
    assert bool((second == 9).all())


def test_m10_allocating_in_a_sleeping_pool_names_the_wake(memory: Memory) -> None:
    pool = memory.pool("weights")
    kept = pool.empty(10)
    memory.sleep({"weights": "host"})
    for allocate in (lambda: pool.empty(3), lambda: pool.zeros(3), lambda: pool.reserve(3)):
        with pytest.raises(StateError, match=r"wake\(\['weights'\]\)") as caught:
            allocate()
        assert caught.value.fields["state"] == "asleep"
    memory.wake()
    assert pool.empty(3).shape == (3,)
    assert kept.shape == (10,)


def test_m10_an_empty_pool_sleeps_too(memory: Memory) -> None:
    pool = memory.pool("kv_cache")
    memory.sleep({"kv_cache": "host"})
    assert pool.residency is Residency.ASLEEP
    with pytest.raises(StateError):
        pool.empty(3)
    memory.wake()
    assert (pool.residency, pool.content) == (Residency.RESIDENT, Content.VALID)


def test_m10_garbage_that_dies_in_mid_sleep_is_taken_back_later(memory: Memory) -> None:
    class Cycle:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.me, self.tensor = self, tensor

    pool = memory.pool("weights")
    keep = pool.zeros(MIB, torch.uint8).fill_(3)
    doomed = [Cycle(pool.zeros(MIB, torch.uint8)) for _ in range(4)]

    def while_tensors_die(call: Any) -> Any:
        once = iter([True])

        def called(*arguments: Any, **named: Any) -> Any:
            dying = next(once, False)
            if dying:
                doomed.pop()
                gc.collect()
            result = call(*arguments, **named)
            if dying:
                doomed.pop()
                gc.collect()
            return result

        return called

    memory.register_tag_hooks("weights", gc.collect, gc.collect)
    memory.device.save_chunks = while_tensors_die(memory.device.save_chunks)  # type: ignore[method-assign]
    memory.device.restore_chunks = while_tensors_die(memory.device.restore_chunks)  # type: ignore[method-assign]
    for transaction in (memory.sleep, memory.wake):
        transaction()
        memory.check_integrity()
    assert pool.stats().reserved_bytes == MIB
    assert bool((keep == 3).all())


def test_tensors_may_die_on_any_thread(memory: Memory) -> None:
    pool = memory.pool("weights")

    def churn() -> None:
        for _ in range(50):
            pool.empty(3000, torch.uint8).fill_(1)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    memory.check_integrity()
    assert pool.stats().allocated_bytes == 0


def test_close_leaves_living_tensors_alone_and_frees_them_when_they_die() -> None:
    with nothing_leaks():
        memory = Memory(CONFIG)
        kept = memory.pool("weights").zeros(MIB, torch.uint8).fill_(5)
        dead = memory.pool("weights").zeros(2 * MIB, torch.uint8)
        del dead
        memory.close()
        memory.close()
        assert not memory.device.closed
        assert int(kept.sum()) == 5 * MIB
        device = memory.device
        with pytest.raises(StateError, match="closed"):
            memory.pool("weights")
        assert resident_bytes(kept.data_ptr(), kept.data_ptr() + MIB) == MIB
        del kept
        assert device.closed


def test_close_while_asleep_frees_images_and_addresses() -> None:
    with nothing_leaks():
        memory = Memory(CONFIG)
        kept = memory.pool("weights").zeros(MIB, torch.uint8)
        memory.sleep()
        memory.close()
        assert memory.device.stats().committed_bytes == 0
        del kept
        assert memory.device.closed


def test_an_interpreter_that_exits_with_living_tensors_exits_cleanly() -> None:
    script = """
import torch
from torpor.memory import Memory
memory = Memory()
a = memory.pool("weights").zeros(1000)
b = memory.pool("runtime").zeros(1000)
memory.sleep({"runtime": "host"})
closed = Memory()
c = closed.pool("weights").zeros(1000)
closed.sleep()
closed.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_memory_that_is_forgotten_warns() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Memory(CONFIG).pool("weights")
        gc.collect()
    assert any("Memory with tags ('weights',) was not closed" in str(w.message) for w in caught)


def test_a_pool_has_one_setting(memory: Memory) -> None:
    pool = memory.pool("kv_cache", policy="discard", exportable=True)
    assert memory.pool("kv_cache") is pool
    assert memory.pool("kv_cache", "discard", exportable=True) is pool
    for wrong in ({"policy": "host"}, {"exportable": False}, {"guarded": True}, {"image": "release"}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            memory.pool("kv_cache", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'hosts' is not known; known: keep, host, discard"):
        memory.pool("x", policy="hosts")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'dropped' is not known; known: retain, release"):
        memory.pool("x", image="dropped")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="tag"):
        memory.pool("")
    assert memory.tags == ("kv_cache",)


def test_bad_configuration_names_the_setting() -> None:
    for setting, value in (
        ("chunk_bytes", 100),
        ("extent_bytes", 0),
        ("host_limit_bytes", -1),
        ("copy_threads", 0),
        ("device", -1),
        ("driver", "nosuch"),
    ):
        with pytest.raises(ConfigurationError, match=setting) as caught:
            MemoryConfig(**{setting: value})  # type: ignore[arg-type]
        assert caught.value.fields == {"setting": setting, "value": value}


def test_the_size_of_extents_follows_the_driver_that_auto_turns_out_to_be() -> None:
    """A GPU takes twice as long over the small ones that suit a processor."""
    sizes = {driver: MemoryConfig(driver=driver).extent_bytes for driver in ("host", "cuda")}
    assert sizes == {"host": 64 * MIB, "cuda": 512 * MIB}
    for driver, size in sizes.items():
        assert dataclasses.replace(MemoryConfig(), driver=driver).extent_bytes == size
        assert dataclasses.replace(MemoryConfig(extent_bytes=2 * MIB), driver=driver).extent_bytes == 2 * MIB
    with Memory(MemoryConfig()) as memory:
        assert memory.config.extent_bytes == sizes[memory.config.driver]


def test_a_bad_shape_is_refused(memory: Memory) -> None:
    with pytest.raises(ConfigurationError, match=r"\(2, -1\)"):
        memory.pool("weights").empty((2, -1))


def test_layout_coalesces_and_checks_itself() -> None:
    layout = FreeList(4096, 256)
    offsets = [layout.allocate(256) for _ in range(16)]
    assert layout.allocate(1) is None
    for offset in (offsets[3], offsets[1], offsets[2]):
        assert offset is not None
        layout.free(offset)
        layout.check()
    assert layout.allocate(768) == 256
    assert layout.used_bytes == 4096
