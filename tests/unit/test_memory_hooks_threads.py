"""Hooks that several threads register and unregister at once: none is lost, none comes back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from torpor.memory import Memory, MemoryConfig

CONFIG = MemoryConfig(extent_bytes=1 << 20, chunk_bytes=64 << 10, copy_threads=2)
ROUNDS = 5000
OTHERS = 300  # so that it takes time to go through all of them


@pytest.fixture(autouse=True)
def threads_that_change_at_any_time() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[], None]) -> None:
    ready = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        ready.wait()
        work()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def nothing() -> None:
    return None


def test_two_threads_that_register_and_unregister_lose_no_hook(memory: Memory) -> None:
    for tag in ("weights", "kv_cache", "runtime"):
        memory.pool(tag)
    for _ in range(OTHERS):
        memory.register_tag_hooks("runtime", nothing)

    def register(tag: str) -> None:
        for i in range(ROUNDS):
            unregister = memory.register_tag_hooks(tag, nothing)
            if i % 10:
                unregister()

    at_once(lambda: register("weights"), lambda: register("kv_cache"))
    hooks = {t.tag: t.hooks for t in memory.stats().tags}
    assert hooks == {"weights": ROUNDS // 10, "kv_cache": ROUNDS // 10, "runtime": OTHERS}
