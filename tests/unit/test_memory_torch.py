"""Memory that torch's functions gave: adopted by the pool, asleep and awake like the rest (M1, M7, M10, M12). The functions are
the real ones; what calls them is a small stand-in for torch's allocator."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch_fake import FakeTensor, FakeTorch, OutOfMemory, torch_pool

from torpor._native import Device, Op
from torpor.errors import ConfigurationError, DeviceError, DeviceMemoryError, HookError, StateError
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.memory.torch_cuda import EXPANDABLE
from torpor.testing.driver import every_fault, nothing_leaks

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


@pytest.fixture
def memory() -> Iterator[Memory]:
    with nothing_leaks(), Memory(CONFIG) as m:
        yield m


@pytest.fixture
def fake() -> FakeTorch:
    return FakeTorch()


def filled(fake: FakeTorch, nbytes: int, byte: int) -> FakeTensor:
    tensor = fake.empty(nbytes)
    tensor.fill(byte)
    return tensor


def tag_of(memory: Memory, tensor: FakeTensor) -> str | None:
    return memory.tag_of(tensor)  # type: ignore[arg-type]


def test_what_torch_allocates_inside_belongs_to_the_tag_at_once(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    with pool:
        tensor = filled(fake, 2 * MIB, 1)
        assert tag_of(memory, tensor) == "weights"
        assert memory.stats().tag("weights").resident_bytes == 2 * MIB
    stats = pool.stats()
    assert (stats.regions, stats.allocated_bytes, stats.reserved_bytes) == (1, 2 * MIB, 2 * MIB)
    memory.check_integrity()


def test_m1_m7_torchs_memory_sleeps_and_wakes_with_its_content_and_address(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    with pool:
        tensors = [filled(fake, (i + 1) * MIB, i + 1) for i in range(3)]
    own = pool.zeros(1000, torch.uint8).fill_(9)
    for policy, copied in (("host", 6 * MIB), ("host", 0)):
        report = memory.sleep({"weights": policy})
        assert report.tags[0].copied_bytes - copied in (0, 64 << 10)  # the other tensor's chunk, the first time
        assert pool.residency is Residency.ASLEEP
        memory.check_integrity()
        memory.wake()
        assert all(t.read() == bytes([i + 1]) * t.nbytes for i, t in enumerate(tensors))
        assert bool((own == 9).all())
    memory.check_integrity()


def test_m12_a_look_that_fails_loses_no_region(memory: Memory, fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor_left() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pool = torch_pool(memory, fake, "weights")
    with pool:
        tensor = filled(fake, 2 * MIB, 1)
        with monkeypatch.context() as short:
            short.setattr("torpor.memory.shared.pinned_bytes", no_descriptor_left)
            with pytest.raises(DeviceError, match="Too many open files"):
                memory.stats()
        assert pool.stats().regions == 1
        memory.check_integrity()
    assert tag_of(memory, tensor) == "weights"


def test_m10_entering_a_sleeping_pool_names_the_wake(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    with pool:
        kept = filled(fake, MIB, 1)
    memory.sleep()
    for enter in (lambda: pool, pool.graph_memory):
        with pytest.raises(StateError, match=r"wake\(\['weights'\]\)"), enter():  # type: ignore[attr-defined]
            pass
    memory.wake()
    with pool:
        assert fake.empty(MIB).address != kept.address


def test_m10_torch_gets_nothing_while_the_pool_sleeps(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    other = torch_pool(memory, fake, "runtime")
    mempool = fake.new_mempool(fake.allocator(pool._torch.functions))  # type: ignore[union-attr]
    memory.sleep({"weights": "host"})
    with pytest.raises(OutOfMemory):
        fake.empty(MIB, mempool)
    with other:
        fake.empty(MIB)  # awake
    memory.wake()
    assert tag_of(memory, fake.empty(MIB, mempool)) == "weights"
    fake.drop([mempool])
    memory.check_integrity()


def test_torch_gets_nothing_between_the_image_and_the_unmap(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    mempool = fake.new_mempool(fake.allocator(pool._torch.functions))  # type: ignore[union-attr]
    with pool:
        kept = filled(fake, MIB, 1)
    save, refused = memory.device.save_chunks, []

    def save_while_torch_asks(*arguments: Any, **named: Any) -> Any:
        with pytest.raises(OutOfMemory):
            fake.empty(MIB, mempool)
        refused.append(True)
        return save(*arguments, **named)

    memory.device.save_chunks = save_while_torch_asks  # type: ignore[method-assign]
    memory.sleep()
    assert refused
    memory.wake()
    assert kept.read() == b"\1" * MIB
    fake.drop([mempool])


def test_m10_the_reason_of_torchs_error_is_raised_where_the_pool_is_left(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    side = pool._torch
    assert side is not None
    side.admit(False)
    with pytest.raises(StateError, match="'weights' sleeps") as caught, pool:
        fake.empty(MIB)
    assert isinstance(caught.value.__cause__, OutOfMemory)
    side.admit(True)
    with pytest.raises(OutOfMemory), pool:
        fake.empty(1 << 44)
    with pytest.raises(OutOfMemory), pool:  # nothing was refused: torch's own affair
        raise OutOfMemory
    memory.check_integrity()


def test_a_sleep_while_somebody_is_inside_is_refused_before_anything_happens(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    ran: list[str] = []
    memory.register_tag_hooks("weights", lambda: ran.append("before"))
    with pool:
        with pytest.raises(StateError, match="1 threads are inside pool 'weights'"):
            memory.sleep()
        memory.sleep({"weights": "keep"})
    with pool.graph_memory(), pytest.raises(StateError, match="inside"):
        memory.sleep()
    assert ran == []
    memory.sleep()
    assert pool.residency is Residency.ASLEEP


def test_pools_nest_and_a_pool_may_be_entered_again(memory: Memory, fake: FakeTorch) -> None:
    a, b = torch_pool(memory, fake, "a"), torch_pool(memory, fake, "b")
    with a:
        first = fake.empty(MIB)
        with b:
            second = fake.empty(MIB)
            with a, a:
                third = fake.empty(MIB)
            fourth = fake.empty(MIB)
        fifth = fake.empty(MIB)
    tags = [tag_of(memory, t) for t in (first, second, third, fourth, fifth)]
    assert tags == ["a", "b", "a", "b", "a"]
    with pytest.raises(StateError, match="not inside pool 'a'"):
        a.__exit__(None, None, None)


def test_threads_are_inside_together_each_with_a_mempool_of_its_own(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    together = threading.Barrier(4)
    failures: list[BaseException] = []

    def allocate() -> None:
        try:
            for _ in range(20):
                with pool:
                    together.wait(20)
                    fake.empty(MIB).free()
                    together.wait(20)
        except BaseException as error:
            failures.append(error)
            together.abort()

    threads = [threading.Thread(target=allocate, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert pool.stats().regions == 4  # used again and again
    pool.trim()
    assert pool.stats().regions == 0
    memory.check_integrity()


def test_what_torch_caches_is_given_back_by_trim_and_by_a_sleep(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    with pool:
        kept = filled(fake, MIB, 1)
        filled(fake, 2 * MIB, 2).free()
        pool.trim()  # a MemPool that somebody is in stays
    assert pool.stats().resident_bytes == 3 * MIB
    fake.capture = True
    pool.trim()
    fake.capture = False
    assert pool.stats().resident_bytes == 3 * MIB
    memory.sleep()
    assert (pool.stats().image_bytes, pool.stats().reserved_bytes) == (MIB, MIB)
    memory.wake()
    with pool:
        filled(fake, 2 * MIB, 2).free()
    pool.trim()
    assert pool.stats().resident_bytes == MIB
    assert kept.read() == b"\1" * MIB


def test_graph_memory_is_kept_until_the_end(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "cuda_graph", policy="discard")
    with pool.graph_memory() as pool_id:
        graphs = pool._torch.mempools._graphs  # type: ignore[union-attr]
        assert graphs.id == pool_id
        output, scratch = fake.empty(MIB, graphs), fake.empty(MIB, graphs)
        scratch.free()  # a graph goes on using it
    with pool.graph_memory() as again:
        assert again == pool_id
    pool.trim()
    memory.sleep()
    assert pool.stats().reserved_bytes == 2 * MIB
    memory.wake()
    assert pool.content is Content.LOST
    memory.mark_valid("cuda_graph")
    assert tag_of(memory, output) == "cuda_graph"


def test_nobody_waits_for_the_device_while_a_graph_is_captured(memory: Memory, fake: FakeTorch) -> None:
    """Waiting breaks the capture."""
    pool, other = torch_pool(memory, fake, "cuda_graph"), torch_pool(memory, fake, "weights")
    with other:
        first, second = fake.empty(MIB), fake.empty(MIB)
    other.trim()
    memory.device.synchronize = lambda: pytest.fail("waited")  # type: ignore[method-assign]
    with pool.graph_memory():
        first.free()
        assert memory.device.stats().mapped_bytes == 2 * MIB
        other.empty(10)
        second.free()
        with pytest.raises(StateError, match="being captured"):
            memory.sleep({"weights": "host"})
        assert other.residency is Residency.RESIDENT
        memory.device.synchronize = lambda: None  # type: ignore[method-assign]
    assert memory.device.stats().mapped_bytes == MIB  # at once when the capture ends; the spare for small tensors stays
    assert other.stats().allocated_bytes == 0
    memory.check_integrity()
    assert other.stats().resident_bytes == MIB  # the spare for small tensors


def test_m10_frees_never_wait_for_the_transaction_they_happen_in(memory: Memory, fake: FakeTorch) -> None:
    pool, other = torch_pool(memory, fake, "weights"), torch_pool(memory, fake, "runtime")
    with pool:
        keep = filled(fake, MIB, 7)
        doomed = [filled(fake, MIB, 1) for _ in range(4)]
    with other:
        neighbours = [filled(fake, MIB, 1) for _ in range(2)]
    pool.trim()
    other.trim()

    def free_elsewhere() -> None:
        mapped = memory.device.stats().mapped_bytes
        thread = threading.Thread(target=lambda: (doomed.pop().free(), neighbours.pop().free()), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        doomed.pop().free()
        assert memory.device.stats().mapped_bytes == mapped  # the transaction may be using it

    unregister = memory.register_tag_hooks("weights", free_elsewhere, free_elsewhere)
    memory.sleep({"weights": "host"})
    memory.check_integrity()
    assert pool.stats().reserved_bytes == 3 * MIB
    memory.wake()
    unregister()
    memory.check_integrity()
    assert (pool.stats().resident_bytes, other.stats().resident_bytes) == (MIB, 0)
    assert keep.read() == b"\7" * MIB


def test_m10_a_free_while_asleep_gives_the_image_back(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    with pool:
        keep, go = filled(fake, MIB, 1), filled(fake, 2 * MIB, 2)
    pool.trim()
    memory.sleep()
    go.free()
    memory.check_integrity()
    assert (pool.stats().image_bytes, pool.stats().reserved_bytes) == (MIB, MIB)
    assert memory.wake().tags[0].restored_bytes == MIB
    assert keep.read() == b"\1" * MIB


def test_frees_give_memory_back_without_a_call_and_the_pool_stays_resident(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    with pool:
        keep, go = fake.empty(MIB), fake.empty(2 * MIB)
    pool.trim()
    assert memory.device.stats().mapped_bytes == 3 * MIB
    go.free()
    assert memory.device.stats().mapped_bytes == MIB
    assert (pool.residency, pool.stats().allocated_bytes) == (Residency.RESIDENT, MIB)
    assert tag_of(memory, keep) == "weights"


def test_hooks_may_enter_pools_that_stay_or_come_back(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    made: list[FakeTensor] = []

    def enter() -> None:
        with pool:
            made.append(filled(fake, MIB, 5))

    enter()
    memory.register_tag_hooks("weights", enter, enter)
    memory.sleep()
    assert pool.stats().image_bytes == 2 * MIB
    memory.wake()
    assert [t.read() for t in made] == [b"\5" * MIB] * 3
    memory.check_integrity()


def test_a_sleep_that_is_undone_leaves_the_pool_open(memory: Memory, fake: FakeTorch) -> None:
    pool = torch_pool(memory, fake, "weights")
    made: list[FakeTensor] = []

    def come_back() -> None:
        with pool:
            made.append(fake.empty(MIB))

    def refuse() -> None:
        raise RuntimeError("not now")

    come_back()
    memory.register_tag_hooks("weights", refuse)
    memory.register_tag_hooks("weights", None, come_back)
    with pytest.raises(HookError):
        memory.sleep()
    assert len(made) == 2
    with pool:
        fake.empty(MIB)


def test_m12_every_fault_leaves_a_state_that_goes_on(fake: FakeTorch) -> None:
    for fault in every_fault([Op.CREATE, Op.MAP, Op.SET_ACCESS, Op.UNMAP, Op.RELEASE, Op.COPY, Op.HASH]):
        with Memory(dataclasses.replace(CONFIG, chunk_bytes=MIB), device=fault.device) as memory:
            pool = torch_pool(memory, fake, "weights")
            with pool:
                tensors = [filled(fake, MIB, i) for i in range(3)]
                fake.empty(MIB).free()
            with fault:
                for call in (memory.sleep, memory.wake):
                    with contextlib.suppress(DeviceError, DeviceMemoryError):
                        call()
                    memory.check_integrity()
            memory.sleep()
            memory.wake()
            assert [t.read() for t in tensors] == [bytes([i]) * MIB for i in range(3)]
            tensors.pop().free()
            memory.check_integrity()
            for tensor in tensors:
                tensor.free()


def test_close_frees_what_nobody_uses_and_leaves_the_rest_to_torch(fake: FakeTorch) -> None:
    with nothing_leaks():
        memory = Memory(CONFIG)
        pool = torch_pool(memory, fake, "weights")
        with pool:
            kept, gone = filled(fake, MIB, 3), fake.empty(2 * MIB)
        gone.free()
        own = pool.zeros(MIB, torch.uint8)
        with pool:
            memory.close()
            memory.close()
        assert kept.read() == b"\3" * MIB
        with pytest.raises(StateError, match="closed"), pool:
            pass
        del own
        gc.collect()
        kept.free()


def test_the_device_goes_with_the_last_memory_that_torch_has(fake: FakeTorch) -> None:
    with nothing_leaks():
        device = Device.open("host")
        for asleep in (False, True):
            memory = Memory(CONFIG, device=device)
            with torch_pool(memory, fake, "weights"):
                kept = fake.empty(MIB)
            if asleep:
                memory.sleep()
            memory.close()
            assert device.stats().live_regions == 1
            if not asleep:
                kept.free()
                assert device.stats().live_regions == 0
        device.close()
        kept.free()


def test_on_the_host_driver_the_error_names_the_alternative(memory: Memory) -> None:
    pool = memory.pool("weights")
    enters: list[Callable[[], object]] = [pool.__enter__, pool.graph_memory().__enter__]
    for enter in enters:
        with pytest.raises(ConfigurationError, match=r"pool\.empty"):
            enter()
    pool.trim()
    memory.sleep()


def test_expandable_segments_is_cut_out_of_any_settings() -> None:
    cases = {
        "expandable_segments:True": "",
        "max_split_size_mb:512, expandable_segments : True": "max_split_size_mb:512",
        "expandable_segments:True,roundup_power2_divisions:[256:1,512:2]": "roundup_power2_divisions:[256:1,512:2]",
        "backend:native": "backend:native",
        "": "",
    }
    assert {text: EXPANDABLE.sub("", text).strip(" ,") for text in cases} == cases


def test_an_interpreter_exits_cleanly_with_memory_that_torch_has() -> None:
    script = """
from torch_fake import FakeTorch, torch_pool
from torpor.memory import Memory
memory, fake = Memory(), FakeTorch()
pool = torch_pool(memory, fake, "weights")
with pool:
    a = fake.empty(1 << 20)
pool.__enter__()
closed = Memory()
with torch_pool(closed, fake, "weights"):
    b = fake.empty(1 << 20)
closed.sleep()
closed.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd="tests/unit")
    assert (done.returncode, done.stderr) == (0, "")
