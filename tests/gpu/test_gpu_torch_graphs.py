"""CUDA graphs whose memory is in a pool: they replay after a sleep and a wake, without recapture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch_kit import GPU, MIB, closed_memory, free_bytes, in_threads, noise, sleep

from torpor.errors import StateError
from torpor.memory import Memory, MemoryConfig

pytestmark = pytest.mark.gpu


@pytest.fixture
def memory() -> Iterator[Memory]:
    with closed_memory() as opened:
        yield opened


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
        old = [noise(30 * MIB), noise(30 * MIB)]
    weights.trim()
    x = torch.ones(1000, device=GPU)
    graph = torch.cuda.CUDAGraph()
    made: list[torch.Tensor] = []

    def elsewhere(_: int) -> None:
        with weights:
            made.append(torch.empty(30 * MIB, dtype=torch.uint8, device=GPU))
        old.pop()
        torch.cuda.empty_cache()  # frees: the memory goes when the capture is over, since waiting for the device would break it

    mode = "thread_local"  # with "global" torch allows no allocation of another thread, pool or not
    with graphs.graph_memory() as pool_id, torch.cuda.graph(graph, pool=pool_id, capture_error_mode=mode):
        y = x + 1
        in_threads(1, elsewhere)
        weights.trim()  # this thread captures: nothing happens
        y = y * 2
    assert [memory.tag_of(t) for t in (y, made[0], old[0])] == ["cuda_graph", "weights", "weights"]
    assert weights.stats().resident_bytes == 60 * MIB
    graph.replay()
    assert float(y.sum()) == 4000
    sleep(memory, "cuda_graph", "weights")
    memory.wake()
    graph.replay()
    assert float(y.sum()) == 4000
    graph.reset()
    del made[:], old[:]


@pytest.mark.alone
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
