"""``with pool:`` on a GPU: what torch allocates inside belongs to the tag (M1, M2, M7, M10, M11), and only that."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from torpor.errors import StateError
from torpor.memory import Content, Memory, MemoryConfig, Pool, Residency
from torpor.memory.torch_cuda import guests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]

MIB = 1 << 20
GPU = "cuda:0"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
    torch.cuda.init()
    memory = Memory(MemoryConfig(driver="cuda"))
    yield memory
    gc.collect()
    memory.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what tensors of a failed test still had
    assert memory.device.closed
    assert guests.nobody


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device=GPU).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=GPU, generator=generator)


def sleep(memory: Memory, *tags: str, policy: str = "host") -> None:
    torch.cuda.synchronize()
    memory.sleep(dict.fromkeys(tags, policy))


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


# ---- what torch gives back -----------------------------------------------------------------------------------------------


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


def in_threads(count: int, call: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            call(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []


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


# ---- graphs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["discard", "host"])
def test_graphs_replay_after_a_sleep_without_recapture(memory: Memory, policy: str) -> None:
    pool = memory.pool("cuda_graph", policy="discard")
    a = torch.randn(512, 512, device=GPU)
    weight = torch.randn(512, 512, device=GPU)

    def compute(x: torch.Tensor) -> torch.Tensor:
        scale = torch.arange(512, device=GPU, dtype=x.dtype)  # a constant that the graph makes
        hidden = torch.relu(x @ weight)
        parts = torch.zeros(512, 512, device=GPU)
        parts[:256].copy_(hidden[256:])
        parts += hidden * scale
        return parts.softmax(-1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            compute(a)
    torch.cuda.synchronize()
    graphs, outputs = [], []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with pool.graph_memory() as pool_id, torch.cuda.graph(graph, pool=pool_id, stream=stream):
            outputs.append(compute(a))
        graphs.append(graph)
    assert {memory.tag_of(t) for t in outputs} == {"cuda_graph"}
    assert pool.stats().resident_bytes > 0
    addresses = [t.data_ptr() for t in outputs]
    for cycle in range(3):
        sleep(memory, "cuda_graph", policy=policy)
        assert pool.stats().resident_bytes == 0
        filler = torch.full((64 * MIB,), 7.0, device=GPU)  # the pages come back with other content
        del filler
        torch.cuda.empty_cache()
        memory.wake()
        memory.mark_valid("cuda_graph")
        a.copy_(torch.randn(512, 512, device=GPU, generator=torch.Generator(GPU).manual_seed(cycle)))
        expected = compute(a)
        for graph, output in zip(graphs, outputs, strict=True):
            graph.replay()
            torch.testing.assert_close(output, expected)
    assert [t.data_ptr() for t in outputs] == addresses
    memory.check_integrity()
    del graph, output, outputs
    for one in graphs:
        one.reset()


def test_what_a_replay_reads_and_does_not_write_needs_an_image(memory: Memory) -> None:
    """Some kernels keep counters or tables in graph memory that were filled once, at the capture: "discard" would lose them."""
    pool = memory.pool("cuda_graph")
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(1000, device=GPU)
    with pool.graph_memory() as pool_id, torch.cuda.graph(graph, pool=pool_id):
        table = torch.empty(1000, device=GPU)
        y = x * table
    table.copy_(torch.arange(1000.0))
    sleep(memory, "cuda_graph")
    memory.wake()
    graph.replay()
    assert torch.equal(y.cpu(), torch.arange(1000.0))
    graph.reset()


def test_pools_are_entered_and_freed_in_while_another_thread_captures(memory: Memory) -> None:
    graphs, weights = memory.pool("cuda_graph"), memory.pool("weights")
    with weights:
        old = noise(30 * MIB)
    weights.trim()
    x = torch.ones(1000, device=GPU)
    graph = torch.cuda.CUDAGraph()
    made: list[torch.Tensor] = []

    def elsewhere(_: int) -> None:
        with weights:
            made.append(torch.empty(30 * MIB, dtype=torch.uint8, device=GPU))

    mode = "thread_local"  # with "global" torch allows no allocation of another thread, pool or not
    with graphs.graph_memory() as pool_id, torch.cuda.graph(graph, pool=pool_id, capture_error_mode=mode):
        y = x + 1
        in_threads(1, elsewhere)
        weights.trim()  # somebody is inside: nothing happens
        y = y * 2
    assert [memory.tag_of(t) for t in (y, made[0], old)] == ["cuda_graph", "weights", "weights"]
    graph.replay()
    assert float(y.sum()) == 4000
    sleep(memory, "cuda_graph", "weights")
    memory.wake()
    graph.replay()
    assert float(y.sum()) == 4000
    graph.reset()
    made.clear()


def test_graph_memory_lives_with_its_graphs_and_goes_at_close(memory: Memory) -> None:
    before = free_bytes()
    other = Memory(MemoryConfig(driver="cuda"))
    pool = other.pool("cuda_graph", policy="discard")
    x = torch.ones(MIB, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with pool.graph_memory() as pool_id, torch.cuda.graph(graph, pool=pool_id):
        y = x + 1
        with pytest.raises(StateError, match="inside pool"):
            other.sleep()
    pool.trim()  # not what graphs have
    assert pool.stats().resident_bytes > 0
    other.close()
    graph.replay()
    assert float(y.sum()) == 2 * MIB
    graph.reset()
    del y, graph
    torch.cuda.empty_cache()
    assert other.device.closed
    assert before - free_bytes() < 32 * MIB


# ---- processes of their own ----------------------------------------------------------------------------------------------


def start_child(script: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", script]
    environment = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_expandable_segments_are_off_inside_only_and_other_options_stay() -> None:
    script = """
import torch
from torpor.memory import Memory, MemoryConfig
def settings():
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    return found["expandable_segments"], found["max_split_size"] >> 20, round(found["garbage_collection_threshold"], 2)
with Memory(MemoryConfig(driver="cuda")) as memory:
    outside = torch.ones(30 << 20, device="cuda")
    first = settings()
    pool, other = memory.pool("weights"), memory.pool("cuda_graph", policy="discard")
    with pool:
        inside = torch.ones(30 << 20, device="cuda")
        with other, pool:
            second = settings()
        third = settings()
    fourth = settings()
    graph = torch.cuda.CUDAGraph()
    with other.graph_memory() as pool_id, torch.cuda.graph(graph, pool=pool_id):
        fifth = settings()
        captured = outside * 2
    after = torch.ones(30 << 20, device="cuda")
    assert first == fourth == settings() == (True, 512, 0.9), (first, fourth, settings())
    assert second == third == fifth == (False, 512, 0.9), (second, third, fifth)
    tags = [memory.tag_of(t) for t in (outside, inside, captured, after)]
    assert tags == [None, "weights", "cuda_graph", None], tags
    torch.cuda.synchronize()
    memory.sleep()
    memory.wake()
    memory.mark_valid("cuda_graph")
    graph.replay()
    assert int(inside.sum()) == 30 << 20 and int(captured.sum()) == 60 << 20
    del inside, captured, graph
print("ok")
"""
    options = "max_split_size_mb:512,expandable_segments:True,garbage_collection_threshold:0.9"
    child = start_child(script, PYTORCH_CUDA_ALLOC_CONF=options)
    assert (*child.communicate(timeout=100), child.returncode) == ("ok\n", "", 0)


LIVING = """
import sys, threading, torch
from torpor.memory import Memory, MemoryConfig
memory = Memory(MemoryConfig(driver="cuda"))
pool = memory.pool("weights")
with pool:
    a = torch.ones(30 << 20, device="cuda")
with memory.pool("runtime"):
    b = torch.ones(30 << 20, device="cuda")
x = torch.ones(100, device="cuda")
graph = torch.cuda.CUDAGraph()
with memory.pool("cuda_graph").graph_memory() as pool_id, torch.cuda.graph(graph, pool=pool_id):
    y = x + 1
torch.cuda.synchronize()
"""


ENDINGS = (
    "",
    "memory.sleep()",
    "memory.sleep(); del a, b, y; torch.cuda.empty_cache()",
    "memory.close()",
    "memory.sleep(); memory.close()",
    "pool.__enter__()",
    "pool.__enter__(); sys.exit(0)",
    "threading.Thread(target=lambda: (pool.__enter__(), threading.Event().wait()), daemon=True).start()",
    "del memory, pool",
    "pool.me = pool; y.me = y; del memory, pool, a, b, x, y",
)


def test_an_interpreter_that_exits_exits_cleanly() -> None:
    children = {ending: start_child(LIVING + ending) for ending in ENDINGS}
    outcomes = {ending: (*child.communicate(timeout=100), child.returncode) for ending, child in children.items()}
    assert outcomes == dict.fromkeys(ENDINGS, ("", "", 0))
