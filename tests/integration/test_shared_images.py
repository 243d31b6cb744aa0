"""Engines in processes of their own with the same weights: one image between them, whatever becomes of any (M4, M6, M7, M12)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_child
import pytest
from image_child import SIZE

from torpor.memory.image_files import why_impossible
from torpor.memory.procfs import processes

PIECE = 8 << 20  # 128 chunks of 64 KiB
SPREAD = 4 << 20  # what a process may take beside its image: allocators, tables


SERVER = multiprocessing.get_context("forkserver")  # torch is imported once, in a process that has no threads
SERVER.set_forkserver_preload(["torch", "image_child"])
SALT = os.getpid() << 16  # other runs of these tests on the same machine must not share with this one


class Child:
    def __init__(self) -> None:
        self._commands, theirs = SERVER.Pipe()
        self._process = SERVER.Process(target=image_child.main, args=(theirs, SALT), daemon=True)
        self._process.start()
        theirs.close()
        assert self.do("right")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def do(self, *words: Any) -> Any:
        self.ask(*words)
        return self.answer()

    def ask(self, *words: Any) -> None:
        self._commands.send(words)

    def answer(self) -> Any:
        try:
            return self._commands.recv()
        except EOFError:
            raise AssertionError(f"an engine ended with {self.died()}") from None

    def pss(self) -> int:
        with open(f"/proc/{self.pid}/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))

    def died(self) -> int | None:
        self._process.join(60)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._commands.close()


@pytest.fixture
def children(request: pytest.FixtureRequest) -> Iterator[list[Child]]:
    """Two, or as many as a test is parametrized with."""
    if reason := why_impossible():
        pytest.skip(reason)
    started = [Child() for _ in range(getattr(request, "param", 2))]
    yield started
    names = set().union(*(image_files_of(child.pid) for child in started))
    for child in started:
        child.kill()
    left = set().union(*(image_files_of(pid) for pid in processes()))
    assert names.isdisjoint(left), "nothing is left of engines that were killed"


def image_files_of(pid: int) -> set[str]:
    """Names of the images' files that a process has open or mapped."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                names.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        names.update(line.split(maxsplit=5)[5] for line in maps.splitlines() if "/memfd:" in line)
    return {name for name in names if name.startswith("/memfd:torpor-image-")}


@pytest.mark.parametrize("children", [2, 4], indirect=True)
def test_asleep_they_take_one_image_of_memory(children: list[Child]) -> None:
    """By their proportional set sizes: 64 MiB of weights each, asleep at level 1."""
    awake = [child.pss() for child in children]  # the weights, no image yet
    first, *others = children
    assert first.do("share") == {"found": 0, "made": SIZE, "private": 0}
    for other in others:
        assert other.do("share") == {"found": SIZE, "made": 0, "private": 0}
    assert not any(child.do("sleep") for child in children), "the first sleep has nothing to copy"
    asleep = [child.pss() for child in children]
    without = sum(awake) - len(children) * SIZE  # what the processes are beside their weights
    assert sum(asleep) - without == pytest.approx(SIZE, abs=2 * SPREAD)
    for child in children:
        assert child.pss() == pytest.approx(asleep[0], abs=SPREAD), "each has its share"
        child.do("wake")
        assert child.do("right")


@pytest.mark.parametrize("children", [4], indirect=True)
def test_four_at_the_same_moment_make_one_image(children: list[Child]) -> None:
    """And the death of whoever made it takes nothing from those who sleep."""
    for child in children:
        child.ask("share")
    shares = [child.answer() for child in children]
    assert sum(share["made"] for share in shares) == SIZE
    assert sum(share["found"] for share in shares) == 3 * SIZE
    assert not any(child.do("sleep") for child in children)
    maker = next(child for child, share in zip(children, shares, strict=True) if share["made"])
    maker.kill()
    for child in children:
        if child is not maker:
            child.do("wake")
            assert child.do("right")


def test_m7_new_weights_of_one_are_its_own(children: list[Child]) -> None:
    first, second = children
    for child in children:
        child.do("share")
        child.do("sleep")
        child.do("wake")
    second.do("fill", 2)
    assert second.do("sleep") == SIZE
    assert first.do("sleep") == 0
    for child in children:
        child.do("wake")
        assert child.do("right")
    second.do("fill", 1)
    assert second.do("share") == {"found": SIZE, "made": 0, "private": 0}
    assert second.do("sleep") == 0


@pytest.mark.parametrize("asleep", [False, True])
def test_m6_the_death_of_the_maker_takes_nothing_from_the_other(children: list[Child], asleep: bool) -> None:
    first, second = children
    for child in children:
        child.do("share")
        if asleep:
            child.do("sleep")
    first.kill()
    if not asleep:
        second.do("sleep")
    second.do("wake")
    assert second.do("right")
    third = children[0] = Child()
    assert third.do("share") == {"found": SIZE, "made": 0, "private": 0}, "who comes late finds it with whoever has it"
    second.kill()
    third.do("sleep")
    third.do("wake")
    assert third.do("right")


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", ["turn", "find", "file", "write", "seal", "sealed", "adopt"])
def test_m12_a_maker_killed_at_any_point_leaves_an_image_that_is_right_or_none(
    children: list[Child], point: str, nth: int
) -> None:
    first, second = children
    if point in ("turn", "find"):
        nth = 1
    first.do("signal_at", point, nth, int(signal.SIGKILL))
    first.ask("share")
    assert first.died() == -signal.SIGKILL
    report = second.do("share")
    assert report["private"] == 0
    assert report["found"] + report["made"] == SIZE
    assert second.do("sleep") == 0
    second.do("wake")
    assert second.do("right")


def test_a_maker_that_was_stopped_is_not_waited_for_for_ever(children: list[Child], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = children
    first.do("signal_at", "adopt", 3, int(signal.SIGSTOP))
    first.ask("share")
    _wait_until_stopped(first.pid)
    second.ask("share")
    time.sleep(1)
    os.kill(first.pid, signal.SIGCONT)
    assert first.answer()["private"] == 0
    report = second.answer()
    assert report["private"] == 0
    assert report["found"] >= 2 * PIECE
    for child in children:
        assert child.do("sleep") == 0
        child.do("wake")
        assert child.do("right")


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 60
    while "State:\tT" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("seed", range(6))
def test_two_start_at_the_same_moment_and_one_may_die(children: list[Child], seed: int) -> None:
    dice = random.Random(seed)
    first, second = children
    for child in children:
        child.ask("share")
    if seed % 2:
        time.sleep(dice.random() * 0.3)
        first.kill()
        report = second.answer()
        assert report["found"] + report["made"] == SIZE
    else:
        reports = [child.answer() for child in children]
        assert sum(report["made"] for report in reports) == SIZE
        assert sum(report["found"] for report in reports) == SIZE
    assert second.do("sleep") == 0
    second.do("wake")
    assert second.do("right")
