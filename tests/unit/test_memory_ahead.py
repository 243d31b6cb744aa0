"""``Memory.take_ahead``: host memory for images before there are any. Only a matter of time, whatever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from sharing_kit import Engine

from torpor._native import Arena, Device, Op
from torpor.errors import ConfigurationError, DeviceError, HostMemoryError, StateError
from torpor.memory import Memory, MemoryConfig, backing
from torpor.memory.clock import Waits
from torpor.testing.driver import Fault, every_fault, nothing_leaks

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
SIZE = 20 * CHUNK + 100
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=CHUNK, copy_threads=2)
WHOLE = 20 * CHUNK + 4 * KIB  # what the image of SIZE bytes takes, in pages


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "COMMIT_CHUNKS", 2)


def filled(memory: Memory) -> torch.Tensor:
    return memory.pool("weights").empty(SIZE, torch.uint8).copy_(content())


def content() -> torch.Tensor:
    return torch.arange(SIZE).remainder(251).to(torch.uint8)


def load(memory: Memory, tensor: torch.Tensor) -> None:
    with memory.load_in_steps([tensor]) as staging:
        staging.ready(0)
        staging.tensors[0].copy_(content())


def until(done: Callable[[], bool]) -> None:
    for _ in range(5000):
        if done():
            return
        time.sleep(0.001)
    pytest.fail("never")


def taken(memory: Memory, nbytes: int) -> None:
    memory.take_ahead(nbytes)
    until(lambda: memory.stats().host_spare_bytes == nbytes)


def cycles(memory: Memory, tensor: torch.Tensor) -> None:
    memory.check_integrity()
    memory.sleep()
    memory.wake()
    assert torch.equal(tensor, content())


def test_images_find_what_was_taken(memory: Memory, device: Device) -> None:
    tensor = filled(memory)
    taken(memory, WHOLE)
    assert memory.stats().host_committed_bytes == 0
    with Fault(device, Op.COMMIT, count=100):  # there is no more to be had
        memory.prepare_images(fill=True)
    assert (memory.stats().host_spare_bytes, memory.stats().tag("weights").image_bytes) == (0, WHOLE)
    report = memory.end_ahead()
    assert (report.taken_bytes, report.unused_bytes, report.failure) == (WHOLE, 0, "")
    cycles(memory, tensor)


@pytest.mark.parametrize("guess", [CHUNK, 10 * CHUNK, WHOLE - 4 * KIB, 30 * CHUNK])
@pytest.mark.parametrize("early", [True, False])
def test_a_wrong_guess_costs_time_and_nothing_else(memory: Memory, guess: int, early: bool) -> None:
    tensor = filled(memory).zero_()
    taken(memory, guess) if early else memory.take_ahead(guess)
    load(memory, tensor)
    assert torch.equal(tensor, content())
    report = memory.end_ahead()
    assert report.taken_bytes - report.unused_bytes == min(guess, WHOLE)
    stats = memory.stats()
    assert (stats.host_spare_bytes, stats.host_committed_bytes) == (0, stats.tag("weights").image_bytes)
    assert memory.device.stats().committed_bytes == WHOLE
    assert memory.sleep().tags[0].copied_bytes == 0
    memory.wake()
    cycles(memory, tensor)


def test_it_is_taken_once_and_only_before_there_are_images(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = filled(memory)
    taken(memory, CHUNK)
    monkeypatch.setattr(Arena, "commit_ahead", lambda *arguments: pytest.fail("once more"))
    memory.take_ahead(5 * CHUNK)
    assert memory.end_ahead().taken_bytes == CHUNK
    memory.take_ahead(5 * CHUNK)
    memory.prepare_images()
    memory.take_ahead(40 * CHUNK)
    assert memory.end_ahead().taken_bytes == CHUNK
    cycles(memory, tensor)


def test_ending_it_is_idempotent_and_needs_no_beginning(memory: Memory) -> None:
    assert memory.end_ahead().taken_bytes == 0
    taken(memory, CHUNK)
    assert memory.end_ahead().unused_bytes == CHUNK
    assert memory.end_ahead().unused_bytes == 0
    assert memory.device.stats().spare_bytes == 0


def test_what_cannot_be_had_is_not_begun(memory: Memory, device: Device) -> None:
    with pytest.raises(HostMemoryError) as refused:
        memory.take_ahead(1 << 46)
    assert refused.value.fields["bytes_needed"] == 1 << 46
    with pytest.raises(ConfigurationError, match="more than 0"):
        memory.take_ahead(0)
    assert device.fault_calls(Op.COMMIT) == 0
    taken(memory, CHUNK)  # less, of which there is enough
    assert memory.end_ahead().taken_bytes == CHUNK
    tensor = filled(memory)
    memory.prepare_images()
    cycles(memory, tensor)
    del tensor  # the error's traceback keeps this frame


def test_the_limit_holds_for_it(device: Device) -> None:
    with Memory(MemoryConfig(**{**vars(CONFIG), "host_limit_bytes": WHOLE}), device=device) as memory:
        with pytest.raises(HostMemoryError) as refused:
            memory.take_ahead(WHOLE + 4 * KIB)
        assert refused.value.fields["setting"] == "host_limit_bytes"
        assert device.fault_calls(Op.COMMIT) == 0
        tensor = filled(memory)
        taken(memory, WHOLE)
        memory.prepare_images()
        assert device.stats().committed_bytes + device.stats().spare_bytes == WHOLE
        cycles(memory, tensor)
        del tensor


@pytest.mark.parametrize("nth", [1, 2, 3, 8])
def test_m12_what_fails_ahead_is_taken_by_who_needs_it(memory: Memory, device: Device, nth: int) -> None:
    tensor = filled(memory)
    with Fault(device, Op.COMMIT, nth):
        memory.take_ahead(WHOLE)
        until(lambda: memory.device.stats().spare_bytes > 0 or nth == 1)
        until(lambda: device.fault_calls(Op.COMMIT) >= nth)
    memory.prepare_images(fill=True)
    report = memory.end_ahead()
    assert "injected" in report.failure
    assert report.failure in str(report)
    assert report.taken_bytes < WHOLE
    cycles(memory, tensor)


def test_m12_every_driver_call_may_fail_beside_a_load() -> None:
    for fault in every_fault([Op.COMMIT, Op.COPY, Op.HASH]):
        memory = Memory(CONFIG, device=fault.device)
        tensor = filled(memory).zero_()
        with fault:
            memory.take_ahead(WHOLE)
            try:
                load(memory, tensor)
            except (DeviceError, HostMemoryError):
                memory.check_integrity()
                fault.device.clear_faults()
                load(memory, tensor)
            memory.end_ahead()
        assert torch.equal(tensor, content())
        assert fault.device.stats().spare_bytes == 0
        cycles(memory, tensor)
        memory.close()
        del tensor


@pytest.mark.parametrize("wait_s", [0.0, 0.002])
def test_a_close_in_the_middle_gives_all_back(device: Device, wait_s: float) -> None:
    memory = Memory(CONFIG, device=device)
    memory.take_ahead(64 * MIB)
    time.sleep(wait_s)
    memory.close()
    assert device.stats().spare_bytes == device.stats().live_arenas == 0
    with pytest.raises(StateError, match="closed"):
        memory.take_ahead(CHUNK)


def test_shared_images_take_the_place_of_what_was_taken() -> None:
    with nothing_leaks():
        one = Engine(77)
        one.memory.take_ahead(one.weights.nbytes)
        report = one.memory.share_images("weights")
        assert report.private_bytes == 0
        assert one.memory.end_ahead().unused_bytes > 0 or one.memory.stats().host_spare_bytes == 0
        assert one.memory.stats().host_spare_bytes == 0
        assert one.cycle() == 0
        assert one.right
        one.memory.check_integrity()
        one.memory.close()
        del one


def test_waits_at_once_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 5.0, 10.0, 12.0])
    monkeypatch.setattr("torpor.memory.clock.time.perf_counter", lambda: next(now))
    waits = Waits()
    with waits, waits:  # 1 to 5
        pass
    assert waits.seconds == 4.0
    thread = threading.Thread(target=lambda: waits.__enter__())
    thread.start()
    thread.join()
    with waits:
        assert waits.seconds == 4.0
    waits.__exit__()
    assert waits.seconds == 6.0
