"""Sharing of images in bad times: several at once, dead and stuck engines, failing calls (M12)."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from sharing_kit import SIZE, Engine, engine, files_open, small_pieces

from torpor._native import Op
from torpor.errors import ConfigurationError, HostMemoryError, TorporError
from torpor.memory import Memory, MemoryConfig, image_files, sharing
from torpor.memory.image_files import Turn, find_files, make_file, why_impossible
from torpor.testing.driver import every_fault

__all__ = ["engine", "small_pieces"]


# ---- whose turn it is ----------------------------------------------------------------------------------------------------------


def test_two_at_the_same_moment_make_one_image(engine: Any) -> None:
    for seed in range(5):
        engines = [engine(seed=seed) for _ in range(3)]
        reports: list[Any] = [None] * 3

        def share(i: int, engines: list[Engine] = engines, reports: list[Any] = reports) -> None:
            reports[i] = engines[i].memory.share_images("weights")

        threads = [threading.Thread(target=share, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(r.made_bytes for r in reports) == engines[0].image
        assert sum(r.found_bytes for r in reports) == 2 * engines[0].image
        for one in engines:
            assert one.cycle() == 0
            assert one.right
            one.memory.close()


def test_one_who_never_gets_on_is_not_waited_for_for_ever(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    keys: list[str] = []
    monkeypatch.setattr(sharing, "PATIENCE_S", 0.1)
    monkeypatch.setattr(sharing, "Turn", lambda key: keys.append(key) or Turn(key))
    one.memory.share_images("weights")
    one.memory.release_images("weights")
    stuck = Turn(keys[0])
    assert stuck.take()
    with contextlib.closing(stuck), ThreadPoolExecutor(1) as other:
        sharing_now = other.submit(one.memory.share_images, "weights")
        try:
            report = sharing_now.result(30)
        finally:
            stuck.close()
    assert report.shared_bytes == 0
    assert report.private_bytes >= SIZE
    assert "another engine" in str(report)
    assert one.cycle() == report.private_bytes, "it goes on with an image of its own"
    assert one.right


def test_a_turn_is_one_processs_at_a_time() -> None:
    first, second = Turn("test"), Turn("test")
    assert first.take()
    assert first.take()
    assert not second.take()
    first.close()
    first.close()
    assert second.take()
    second.close()


# ---- what fails costs an image, never a byte -----------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [False, True])
def test_m12_every_driver_call_may_fail(found: bool) -> None:
    """The call says what is private; the next sleep, wake and try are right."""
    with ExitStack() as undo:
        if found:
            other = Engine(1)
            undo.callback(other.memory.close)
            other.memory.share_images("weights")
        files = files_open()
        for fault in every_fault([Op.COMMIT, Op.COPY, Op.HASH]):
            one = Engine(1, fault.device)
            one.memory.prepare_images(fill=True)
            with fault:
                report = one.memory.share_images("weights")
            assert bool(report.problems) == fault.reached
            one.memory.check_integrity()
            assert one.cycle() <= report.private_bytes
            assert one.right
            assert one.memory.share_images("weights").private_bytes == 0
            assert one.cycle() == 0
            assert one.right
            one.memory.close()
            assert files_open() == files
            del one  # its tensor


@pytest.mark.parametrize("op", [Op.COMMIT, Op.COPY, Op.HASH])
def test_m12_a_sleep_that_fails_while_a_share_is_dropped_can_be_retried(op: Op) -> None:
    for fault in every_fault([op]):
        one = Engine(1, fault.device)
        one.memory.share_images("weights")
        one.seed = 2
        one.fill()
        with fault:
            try:
                one.memory.sleep()
            except TorporError:
                one.memory.check_integrity()
                assert one.right
        one.memory.sleep()
        one.memory.wake()
        assert one.right
        one.memory.close()
        del one


CALLS = ("memfd_create", "ftruncate", "fchmod", "pwrite", "open", "listdir", "readlink")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("nth", [1, 2, 7])
def test_an_engine_that_cannot_share_goes_on_alone(engine: Any, monkeypatch: pytest.MonkeyPatch, name: str, nth: int) -> None:
    one = engine()
    real, calls = getattr(os, name), [0]

    def fail(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] >= nth:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(image_files.os, name, fail)
        report = one.memory.share_images("weights")
    one.memory.check_integrity()
    assert report.shared_bytes + report.private_bytes >= SIZE
    assert bool(report.private_bytes) <= bool(report.problems), "it says why"
    assert one.cycle() == report.private_bytes
    assert one.right


def test_a_file_that_cannot_be_sealed_is_not_shared(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()

    def fail(fd: int, command: int, argument: int = 0) -> int:
        raise OSError(errno.EPERM, "no seals")

    monkeypatch.setattr(image_files.fcntl, "fcntl", fail)
    assert "no seals" in why_impossible()
    assert one.memory.share_images("weights").shared_bytes == 0
    with pytest.raises(ConfigurationError, match=r"cannot be shared here.*no seals"):
        Memory(MemoryConfig(driver="host", share_images=True))


def test_without_host_memory_nothing_is_shared_and_nothing_lost(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    monkeypatch.setattr(sharing, "host_free_bytes", lambda: SIZE // 2)
    report = one.memory.share_images("weights")
    assert report.shared_bytes == 0
    assert "host memory" in str(report)
    assert one.cycle() == report.private_bytes


def test_the_limit_counts_a_shared_image_in_full(engine: Any) -> None:
    first, second = engine(), engine(host_limit_bytes=SIZE // 2)
    first.memory.share_images("weights")
    report = second.memory.share_images("weights")
    assert report.shared_bytes == 0
    assert "host_limit_bytes" in str(report)
    with pytest.raises(HostMemoryError, match="host_limit_bytes"):
        second.memory.sleep()
    assert second.right


def test_an_interrupt_leaves_no_file(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    adopt = type(one.memory._shared.images.shared).adopt
    calls = [0]

    def interrupted(store: Any, piece: Any, descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        adopt(store, piece, descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(type(one.memory._shared.images.shared), "adopt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.memory.share_images("weights")
    assert files_open() == 2
    one.memory.check_integrity()
    one.cycle()
    assert one.right


def test_this_machine_can_share() -> None:
    assert why_impossible() == ""


def test_names_are_found_by_the_whole_key() -> None:
    fd = make_file("k" * 40, 10)
    try:
        assert [f.descriptor for f in find_files(["k" * 40])["k" * 40]] == [fd]
        assert find_files(["k" * 39]) == {}
    finally:
        os.close(fd)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_calls_on_three_engines(engine: Any, seed: int) -> None:
    """Contents are those of each engine, whatever the others do, and one image is there while two have the same."""
    dice = random.Random(seed)
    engines = [engine(seed=1) for _ in range(3)]
    for _ in range(25):
        one = dice.choice(engines)
        move = dice.choice(["share", "cycle", "cycle", "refill", "poke", "release", "load"])
        if move == "share":
            assert one.memory.share_images("weights").private_bytes == 0
        elif move == "cycle":
            before = one.weights.clone()
            one.cycle()
            assert torch.equal(one.weights, before)
        elif move == "refill":
            one.seed = dice.choice([1, 2])
            one.fill()
        elif move == "poke":
            one.weights[dice.randrange(SIZE)] ^= dice.randrange(256)
        elif move == "release":
            one.memory.release_images("weights")
        else:
            one.seed = dice.choice([1, 2])
            with one.memory.load_through_images([one.weights]) as [staging]:
                staging.copy_(one.expected())
            del staging
            assert one.right
        one.memory.check_integrity()
