"""Interrupts in single native calls, each of which once left something that nobody counted (M12)."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from interrupts import Interrupt
from sharing_kit import SIZE, engine, files_open, small_pieces

from torpor._native import Device
from torpor.memory import Content, Memory, MemoryConfig, sharing
from torpor.testing.driver import nothing_leaks

__all__ = ["engine", "small_pieces"]

MIB = 1 << 20
CONFIG = MemoryConfig(driver="host", extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)


def counted(memory: Memory) -> bool:
    stats = memory.stats()
    memory.check_integrity()
    return stats.host_committed_bytes == sum(t.image_bytes for t in stats.tags) == memory.device.stats().committed_bytes


@pytest.mark.parametrize("nth", [1, 3])
def test_a_shared_file_that_was_being_adopted_is_not_left_for_a_sleep_to_write_to(engine: Any, nth: int) -> None:
    one = engine()
    with Interrupt(nth, "tp_arena_adopt") as interrupt, pytest.raises(KeyboardInterrupt):
        one.memory.share_images("weights")
    assert interrupt.reached
    assert counted(one.memory)
    assert one.shared == one.image, "what is there is a whole piece, which is known to be read-only"
    one.cycle()
    assert one.right


@pytest.mark.parametrize("nth", [1, 2])
def test_images_that_were_being_released_are_gone_and_made_again(engine: Any, nth: int) -> None:
    one = engine()
    one.memory.prepare_images(fill=True)
    other = one.memory.pool("runtime").empty(SIZE, torch.uint8).fill_(1)
    one.memory.prepare_images(fill=True)
    with Interrupt(1, "tp_arena_decommit"), pytest.raises(KeyboardInterrupt):
        one.memory.release_images(["weights", "runtime"][nth - 1])
    assert counted(one.memory)
    one.cycle()
    assert one.right
    assert other.eq(1).all()
    one.memory.release_images("weights")
    one.cycle()
    assert one.right


def test_memory_that_was_being_taken_for_an_image_is_given_back(engine: Any) -> None:
    one = engine()
    with Interrupt(1, "tp_arena_commit"), pytest.raises(KeyboardInterrupt):
        one.memory.prepare_images()
    assert counted(one.memory)
    assert one.memory.stats().host_committed_bytes == 0
    one.cycle()
    assert one.right


def allocate_and_sleep(memory: Memory) -> None:
    weights = memory.pool("weights").zeros(MIB, torch.uint8)
    memory.sleep()
    del weights


@pytest.mark.parametrize("name", ["tp_region_create", "tp_arena_create"])
def test_what_was_being_made_is_nobodys_and_goes(name: str) -> None:
    with nothing_leaks(), Device.open("host") as device, Memory(CONFIG, device=device) as memory:
        with Interrupt(1, name), pytest.raises(KeyboardInterrupt):
            allocate_and_sleep(memory)
        assert memory.stats().mapped_bytes == memory.stats().tag("weights").reserved_bytes
        assert device.stats().live_arenas == 0
        memory.check_integrity()
        allocate_and_sleep(memory)
        memory.wake()


def test_a_region_that_was_being_destroyed_is_not_asked_any_more() -> None:
    with nothing_leaks(), Memory(CONFIG) as memory:
        kept, dying = [memory.pool("weights").zeros(2 * MIB, torch.uint8) for _ in range(2)]
        del dying
        with Interrupt(1, "tp_region_destroy"), pytest.raises(KeyboardInterrupt):
            memory.pool("weights").reserve(1)
        assert memory.stats().tag("weights").resident_bytes == 2 * MIB
        assert memory.stats().tag("weights").content is Content.VALID
        memory.sleep()
        memory.wake()
        memory.check_integrity()
        assert int(kept.sum()) == 0
        del kept


class InterruptedPool(ThreadPoolExecutor):
    """The wait for its first result is interrupted; or the start of its first thread, for which nobody waits then."""

    at_start = False
    begun = 0

    def submit(self, function: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
        job = super().submit(function, *arguments, **more)
        self.begun += 1
        if self.begun == 1 and self.at_start:
            self._threads.clear()
            raise KeyboardInterrupt
        if self.begun == 1:
            job.result = self._interrupted  # type: ignore[method-assign]
        return job

    def _interrupted(self, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("at_start", [False, True])
def test_a_share_that_is_interrupted_while_a_piece_is_made_leaves_no_file(
    engine: Any, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    one = engine(seed=7)
    monkeypatch.setattr(InterruptedPool, "at_start", at_start)
    with monkeypatch.context() as patch:
        patch.setattr(sharing, "WRITERS", 1)
        patch.setattr(sharing, "ThreadPoolExecutor", InterruptedPool)
        with pytest.raises(KeyboardInterrupt):
            one.memory.share_images("weights")
    assert files_open() == 0, "none was adopted"
    assert counted(one.memory)
    assert one.memory.share_images("weights").private_bytes == 0
    assert one.cycle() == 0
    assert one.right
