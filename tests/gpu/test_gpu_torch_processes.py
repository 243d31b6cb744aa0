"""``with pool:`` in processes of their own: torch's settings, and how an interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


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
