"""``with pool:`` on a GPU: what torch allocates inside belongs to the tag (M1, M2, M7, M10, M11), and only that."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch_kit import GPU, MIB, closed_memory, free_bytes, in_threads, noise, sleep

from torpor.errors import StateError
from torpor.memory import Content, Memory, MemoryConfig, Pool, Residency

pytestmark = pytest.mark.gpu


@pytest.fixture
def memory() -> Iterator[Memory]:
    with closed_memory() as opened:
        yield opened


# ---- what belongs to the tag ---------------------------------------------------------------------------------------------


def test_tensors_made_inside_belong_to_the_tag_and_nothing_else_does(memory: Memory) -> None:
    pool = memory.pool("weights")
    before = torch.empty(MIB, device=GPU)
    with pool:
        large = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
        small = torch.zeros(10, device=GPU)
        module = torch.nn.Linear(256, 256, device=GPU)
    after = torch.empty(MIB, device=GPU)
    assert [memory.tag_of(t) for t in (large, small, module.weight)] == ["weights"] * 3
    assert [memory.tag_of(t) for t in (before, after)] == [None, None]
    stats = pool.stats()
    assert stats.resident_bytes == stats.reserved_bytes == stats.allocated_bytes
    assert 64 * MIB < stats.resident_bytes <= 72 * MIB
    memory.check_integrity()


def test_the_innermost_pool_counts_and_a_pool_may_be_entered_again(memory: Memory) -> None:
    outer, inner = memory.pool("weights"), memory.pool("runtime")
    with outer:
        a = torch.empty(MIB, device=GPU)
        with inner:
            b = torch.empty(MIB, device=GPU)
            with outer, outer:
                c = torch.empty(MIB, device=GPU)
            d = torch.empty(MIB, device=GPU)
        e = torch.empty(MIB, device=GPU)
    f = torch.empty(MIB, device=GPU)
    tags = [memory.tag_of(t) for t in (a, b, c, d, e, f)]
    assert tags == ["weights", "runtime", "weights", "runtime", "weights", None]


@pytest.mark.alone
def test_m1_m7_addresses_stay_and_content_is_bit_identical_over_sleeps(memory: Memory) -> None:
    pool = memory.pool("weights")
    with pool:
        tensors = [noise(size, seed) for seed, size in enumerate((100, 5 * MIB, 64 * MIB, 200 * MIB))]
    copies = [t.cpu() for t in tensors]
    addresses = [t.data_ptr() for t in tensors]
    resident = pool.stats().resident_bytes
    awake = free_bytes()
    for policy in ("host", "host", "discard"):
        sleep(memory, "weights", policy=policy)
        memory.check_integrity()
        assert pool.residency is Residency.ASLEEP
        assert pool.stats().resident_bytes == 0
        assert free_bytes() - awake >= 264 * MIB
        memory.wake()
        assert [t.data_ptr() for t in tensors] == addresses
        if policy == "host":
            assert all(torch.equal(t.cpu(), copy) for t, copy in zip(tensors, copies, strict=True))
    assert pool.content is Content.LOST
    memory.mark_valid("weights")
    assert pool.stats().resident_bytes <= resident


def test_m11_the_report_counts_torchs_segments(memory: Memory) -> None:
    pool = memory.pool("weights")
    with pool:
        kept = noise(32 * MIB)
    resident = pool.stats().resident_bytes
    torch.cuda.synchronize()
    report = memory.sleep({"weights": "host"})
    assert (report.tags[0].unmapped_bytes, report.tags[0].returned_bytes) == (resident, resident)
    assert report.tags[0].image_bytes == resident
    memory.wake()
    again = memory.sleep({"weights": "host"})
    assert again.tags[0].copied_bytes == 0
    memory.wake()
    assert kept.numel() == 32 * MIB


def test_m7_what_torch_made_is_loaded_through_the_images_and_not_copied_at_the_first_sleep(memory: Memory) -> None:
    with memory.pool("weights"):
        module = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16, device=GPU)
    memory.pool("weights").trim()
    parameters = [p.data for p in module.parameters()]
    source = [torch.randn(p.shape).to(p.dtype) for p in parameters]
    with memory.load_through_images(parameters) as staging:
        for target, values in zip(staging, source, strict=True):
            target.copy_(values)
    report = memory.sleep({"weights": "host"})
    assert report.tags[0].copied_bytes < 4 * MIB  # what of the segments no tensor was loaded into
    memory.wake()
    assert all(torch.equal(p.cpu(), values) for p, values in zip(parameters, source, strict=True))


# ---- what torch gives back -----------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_segments_are_used_again_and_trim_gives_them_back(memory: Memory) -> None:
    pool = memory.pool("weights")
    before = free_bytes()
    with pool:
        kept = noise(40 * MIB)
        address = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU).data_ptr()
        again = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
    assert again.data_ptr() == address
    del again
    with pool:
        third = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
    assert third.data_ptr() == address
    del third
    assert pool.stats().resident_bytes >= 104 * MIB
    pool.trim()
    assert pool.stats().resident_bytes == 40 * MIB
    assert before - free_bytes() < 64 * MIB
    with pool:
        fourth = noise(MIB)
    assert memory.tag_of(fourth) == memory.tag_of(kept) == "weights"
    memory.check_integrity()


def test_a_sleep_does_not_copy_what_no_tensor_lies_in(memory: Memory) -> None:
    pool = memory.pool("weights")
    with pool:
        kept = noise(40 * MIB)
        noise(300 * MIB)
    sleep(memory, "weights")
    assert pool.stats().image_bytes == 40 * MIB
    memory.wake()
    assert torch.equal(kept, noise(40 * MIB))


@pytest.mark.alone
def test_empty_cache_gives_back_what_outlived_its_mempool(memory: Memory) -> None:
    pool = memory.pool("weights")
    with pool:
        first, second = noise(40 * MIB), noise(64 * MIB)
    pool.trim()
    del second
    before = free_bytes()
    torch.cuda.empty_cache()
    assert free_bytes() - before >= 64 * MIB
    assert pool.stats().resident_bytes == 40 * MIB
    sleep(memory, "weights")
    del first
    torch.cuda.empty_cache()
    memory.check_integrity()
    assert (pool.stats().reserved_bytes, memory.stats().host_committed_bytes) == (0, 0)


def test_trim_and_sleep_do_no_harm_while_somebody_else_is_inside_a_mempool(memory: Memory) -> None:
    """torch ends the process when a MemPool dies then."""
    weights, runtime = memory.pool("weights"), memory.pool("runtime")
    with weights:
        kept, gone = noise(40 * MIB), noise(64 * MIB)
    foreign = torch.cuda.MemPool()
    outside = noise(30 * MIB)
    del gone, outside
    reserved = torch.cuda.memory_reserved()
    with runtime, torch.cuda.use_mem_pool(foreign):
        weights.trim()
        assert weights.stats().resident_bytes == 40 * MIB
        assert reserved - torch.cuda.memory_reserved() == 64 * MIB  # torch's own cache is left alone
        with weights:
            noise(64 * MIB)
        sleep(memory, "weights")
        assert weights.stats().reserved_bytes == 40 * MIB
        memory.wake(["weights"])
    assert torch.equal(kept, noise(40 * MIB))
    del foreign


def test_what_dies_after_a_sleep_goes_with_the_next(memory: Memory) -> None:
    pool = memory.pool("weights")
    with pool:
        kept, late = noise(40 * MIB), noise(64 * MIB)
    sleep(memory, "weights")
    memory.wake()
    del late
    pool.trim()
    assert pool.stats().resident_bytes == 40 * MIB
    assert memory.tag_of(kept) == "weights"


@pytest.mark.alone
def test_close_gives_everything_back_at_once_or_with_the_last_tensor(memory: Memory) -> None:
    before = free_bytes()
    other = Memory(MemoryConfig(driver="cuda"))
    with other.pool("weights"):
        kept, gone = noise(100 * MIB), noise(100 * MIB)
    with other.pool("runtime"):
        noise(50 * MIB)
    del gone
    other.close()
    assert before - free_bytes() < 150 * MIB
    assert torch.equal(kept, noise(100 * MIB))
    del kept
    torch.cuda.empty_cache()
    assert before - free_bytes() < 50 * MIB
    assert other.device.closed


# ---- threads, garbage, errors --------------------------------------------------------------------------------------------


def test_threads_are_routed_one_by_one(memory: Memory) -> None:
    pools = [memory.pool("weights"), memory.pool("runtime")]
    together = threading.Barrier(6)

    def allocate(index: int) -> None:
        own = pools[index] if index < 2 else pools[0] if index < 4 else None
        for _ in range(20):
            together.wait(30)
            if own is None:
                tensors = [torch.empty(MIB * 3, device=GPU) for _ in range(3)]
            else:
                with own:
                    together.wait(30)
                    tensors = [torch.empty(MIB * 3, device=GPU) for _ in range(3)]
            assert {memory.tag_of(t) for t in tensors} == {None if own is None else own.tag}
            if own is None:
                together.wait(30)

    in_threads(6, allocate)
    sleep(memory, "weights", "runtime")
    memory.check_integrity()
    memory.wake()


def test_m10_tensors_may_die_and_be_freed_in_mid_sleep(memory: Memory) -> None:
    class Cycle:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.me, self.tensor = self, tensor

    pool = memory.pool("weights")
    with pool:
        keep = noise(30 * MIB)
        doomed = [Cycle(noise(30 * MIB)) for _ in range(4)]
    with memory.pool("runtime"):
        other = [noise(30 * MIB) for _ in range(3)]
    pool.trim()
    memory.pool("runtime").trim()

    def die() -> None:
        doomed.pop()
        gc.collect()
        other.pop()
        in_threads(1, lambda _: torch.cuda.empty_cache())

    memory.register_tag_hooks("weights", die, die)
    sleep(memory, "weights")
    memory.check_integrity()
    memory.wake()
    memory.check_integrity()
    assert pool.stats().resident_bytes == 90 * MIB
    assert memory.pool("runtime").stats().resident_bytes == 30 * MIB
    assert torch.equal(keep, noise(30 * MIB))
    del doomed[:], other[:]


def test_a_sleep_inside_the_pool_is_refused_and_changes_nothing(memory: Memory) -> None:
    pool = memory.pool("weights")
    with pool:
        kept = noise(MIB)
        with pytest.raises(StateError, match="inside pool 'weights'"):
            memory.sleep({"weights": "host"})
        memory.sleep({"weights": "keep"})
    assert pool.residency is Residency.RESIDENT
    sleep(memory, "weights")
    memory.wake()
    assert torch.equal(kept, noise(MIB))


def test_m10_allocating_while_asleep_fails_cleanly(memory: Memory) -> None:
    pool = memory.pool("weights")
    with pool:
        kept = noise(MIB)
    sleep(memory, "weights")
    with pytest.raises(StateError, match=r"wake\(\['weights'\]\)"), pool:
        pass
    with pytest.raises(StateError), pool.graph_memory():
        pass
    mempool = mempool_of(pool)
    with pytest.raises(torch.OutOfMemoryError), torch.cuda.use_mem_pool(mempool):
        torch.empty(100 * MIB, device=GPU)
    del mempool
    memory.wake()
    with pool:
        assert torch.equal(noise(MIB), kept)
    torch.zeros(10, device=GPU).sum().item()  # no error is left behind in the context


def mempool_of(pool: Pool) -> torch.cuda.MemPool:
    """A MemPool that somebody made over the pool's functions and enters by torch's own means."""
    torch_memory = pool._torch
    assert torch_memory is not None
    backend = torch_memory._backend
    return torch.cuda.MemPool(backend.allocator(torch_memory.functions))


def test_out_of_memory_inside_is_torchs_own_error_and_leaves_the_pool_whole(memory: Memory) -> None:
    pool = memory.pool("weights")
    with pool:
        kept = noise(MIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 42, dtype=torch.uint8, device=GPU)
    with pytest.raises(torch.OutOfMemoryError), pool:
        torch.empty(1 << 42, dtype=torch.uint8, device=GPU)
    memory.check_integrity()
    sleep(memory, "weights")
    memory.wake()
    assert torch.equal(kept, noise(MIB))
