"""Who waits for whom: hooks may look and export but not sleep; other threads may look at any time and wait to change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from torpor.errors import HookError, StateError
from torpor.memory import Memory, MemoryConfig, Residency
from torpor.memory.procfs import usable_cores
from torpor.memory.shared import default_copy_threads
from torpor.testing.driver import nothing_leaks

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
    with nothing_leaks(), Memory(CONFIG) as m:
        yield m


def in_thread(call: Callable[[], None]) -> None:
    """Runs ``call`` on another thread, and fails rather than wait for a lock for ever."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the other thread is stuck"


def test_hooks_may_look_export_and_allocate(memory: Memory) -> None:
    pool = memory.pool("kv_cache", exportable=True)
    t = pool.zeros(MIB, torch.uint8)
    seen: list[object] = []

    def look() -> None:
        seen.append(memory.stats().tag("kv_cache").residency)
        seen.append(memory.tag_of(t))
        memory.exports("kv_cache").close()
        memory.export_ledger.end(memory.export_ledger.grant("d", "kv_cache"))
        pool.empty(10)

    memory.register_tag_hooks("kv_cache", look, look)
    memory.sleep()
    memory.wake()
    assert seen == [Residency.RESIDENT, "kv_cache"] * 2
    memory.check_integrity()


def test_a_sleep_or_wake_inside_a_hook_is_refused(memory: Memory) -> None:
    t = memory.pool("a").zeros(10)
    calls: list[Callable[[], object]] = [memory.sleep, memory.wake, memory.close]
    for call in calls:
        unregister = memory.register_tag_hooks("a", call)
        with pytest.raises(HookError, match="inside a hook of a sleep") as caught:
            memory.sleep({"a": "host"})
        assert isinstance(caught.value.__cause__, StateError)
        unregister()
    unregister = memory.register_tag_hooks("a", after_map=memory.sleep)
    with pytest.raises(HookError, match="inside a hook of a wake"):
        memory.wake()
    unregister()
    del unregister, caught
    memory.sleep()
    assert t.numel() == 10


def test_other_threads_look_and_acknowledge_while_a_hook_waits_for_them(memory: Memory) -> None:
    pool = memory.pool("a")
    t = pool.zeros(10)
    grant = memory.export_ledger.grant("d", "a")
    seen: list[object] = []

    def acknowledge() -> None:
        seen.append(memory.stats().tag("a").residency)
        seen.append(pool.stats().allocated_bytes)
        seen.append(memory.tag_of(t))
        memory.export_ledger.end(grant)

    memory.register_tag_hooks("a", lambda: in_thread(acknowledge))
    memory.sleep()
    assert seen == [Residency.RESIDENT, 256, "a"]
    assert memory.export_ledger.grants() == ()


def test_allocating_on_another_thread_waits_for_the_sleep_and_then_says_asleep(memory: Memory) -> None:
    pool = memory.pool("a")
    t = pool.zeros(10)
    outcome: list[str] = []

    def allocate() -> None:
        try:
            pool.empty(10)
        except StateError as error:
            outcome.append(error.fields["state"])

    thread = threading.Thread(target=allocate, daemon=True)
    memory.register_tag_hooks("a", thread.start)
    memory.sleep()
    thread.join(10)
    assert outcome == ["asleep"]
    assert t.numel() == 10


def test_transactions_of_several_threads_come_one_after_another(memory: Memory) -> None:
    t = memory.pool("a").zeros(MIB // 4).fill_(3)
    inside = threading.Lock()
    pause = threading.Event()
    overlaps: list[int] = []

    def linger() -> None:
        if not inside.acquire(blocking=False):
            overlaps.append(1)
            return
        pause.wait(0.002)
        inside.release()

    memory.register_tag_hooks("a", linger, linger)

    def cycle() -> None:
        for _ in range(5):
            memory.sleep()
            memory.wake()

    threads = [threading.Thread(target=cycle, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert overlaps == []
    memory.wake()
    memory.check_integrity()
    assert bool((t == 3).all())


def test_half_the_cores_copy_by_default() -> None:
    assert default_copy_threads() == min(12, usable_cores())
