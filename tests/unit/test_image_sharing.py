"""``Memory.share_images``: one image for all with the same content, believed only when it is right, written by nobody."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from sharing_kit import CHUNK, PIECE, SIZE, engine, files_open, small_pieces

from torpor.errors import StateError
from torpor.memory import image_files, sharing
from torpor.memory.image_files import make_file, open_found, seal_file
from torpor.memory.procfs import open_memfds

__all__ = ["engine", "small_pieces"]


# ---- one image -------------------------------------------------------------------------------------------------------------


def test_the_second_engine_uses_what_the_first_has_made(engine: Any) -> None:
    first, second = engine(), engine()
    made, found = first.memory.share_images("weights"), second.memory.share_images("weights")
    assert (made.found_bytes, made.made_bytes, made.private_bytes) == (0, first.image, 0)
    assert (found.found_bytes, found.made_bytes, found.private_bytes) == (second.image, 0, 0)
    assert (made.problems, found.problems) == ((), ())
    assert first.shared == second.shared == second.image >= SIZE
    for one in (first, second):
        one.memory.check_integrity()
        assert one.memory.stats().host_shared_bytes == one.memory.stats().host_committed_bytes == one.image
        assert one.cycle() == 0, "M7: the first sleep finds the image"
        assert one.right


def test_pages_are_the_same_pages(engine: Any) -> None:
    """Proportional set size of the arena: half of the image for each of two mappings, a quarter for each of four."""
    for count in (1, 2, 4):
        engines = [engine(seed=count) for _ in range(count)]
        for one in engines:
            one.memory.share_images("weights")
        assert _pss_of_images() == pytest.approx(engines[0].image, rel=0.01)
        for one in engines:
            one.memory.close()


def _pss_of_images() -> int:
    total, inside = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if "-" in line.split(maxsplit=1)[0]:
                inside = "memfd:torpor-image-" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("change", ["a byte", "chunk size", "place"])
def test_what_differs_is_not_shared(engine: Any, change: str) -> None:
    first = engine()
    first.memory.share_images("weights")
    other = engine(**({"chunk_bytes": 2 * CHUNK} if change == "chunk size" else {}))
    if change == "a byte":
        other.weights[5 * PIECE] ^= 1
    if change == "place":
        other.weights.copy_(other.expected().roll(CHUNK))
    report = other.memory.share_images("weights")
    assert report.private_bytes == 0
    if change == "a byte":
        assert report.made_bytes == PIECE, "only the piece that differs"
    else:
        assert report.found_bytes == 0
    if change != "place":
        assert other.cycle() == 0


def test_a_name_says_in_which_chunks_something_lives(engine: Any) -> None:
    """Two pools whose bytes are the same one chunk apart, with nothing before or behind them."""
    one = engine()
    kept = []
    for tag, before in (("low", 0), ("high", CHUNK)):
        pool = one.memory.pool(tag)
        pool.reserve(PIECE)
        gap = pool.empty(before, torch.uint8) if before else None
        kept.append(pool.empty(CHUNK, torch.uint8).fill_(7))
        del gap
        report = one.memory.share_images(tag)
        assert (report.found_bytes, report.problems) == (0, ()), "it is not even looked at"
    one.memory.sleep()
    one.memory.wake()
    assert all(int(t.min()) == int(t.max()) == 7 for t in kept)


def test_sharing_again_is_a_no_op_that_says_so(engine: Any) -> None:
    one = engine()
    first = one.memory.share_images("weights")
    again = one.memory.share_images("weights")
    assert (again.found_bytes, again.made_bytes) == (0, 0)
    assert again.shared_bytes == first.shared_bytes
    assert files_open() == 11


def test_a_prepared_image_becomes_a_shared_one_and_its_memory_goes(engine: Any) -> None:
    first, second = engine(), engine()
    first.memory.share_images("weights")
    second.memory.prepare_images(fill=True)
    before = second.memory.stats().host_committed_bytes
    assert second.memory.share_images("weights").private_bytes == 0
    assert second.memory.stats().host_committed_bytes == before == second.shared
    assert second.cycle() == 0
    assert second.right


def test_only_a_tag_that_is_valid_can_be_shared(engine: Any) -> None:
    one = engine()
    one.memory.sleep({"weights": "discard"})
    with pytest.raises(StateError, match="asleep"):
        one.memory.share_images("weights")
    one.memory.wake()
    with pytest.raises(StateError, match="lost"):
        one.memory.share_images("weights")
    one.fill()
    one.memory.mark_valid("weights")
    assert one.memory.share_images("weights").private_bytes == 0


# ---- what changes becomes private --------------------------------------------------------------------------------------------


def test_m7_a_change_is_found_by_its_hash_and_reaches_nobody_else(engine: Any) -> None:
    first, second = engine(), engine()
    for one in (first, second):
        one.memory.share_images("weights")
        one.cycle()
    second.weights[3 * PIECE + 11] ^= 0xFF
    changed = second.weights.clone()
    assert second.cycle() == PIECE, "the piece it lies in, and no other, is copied"
    assert second.shared == second.image - PIECE
    assert torch.equal(second.weights, changed)
    assert second.cycle() == 0
    assert first.cycle() == 0
    assert first.right
    second.weights.copy_(second.expected())
    second.cycle()
    assert second.right
    assert second.memory.share_images("weights").found_bytes == PIECE, "what is the same again can be shared again"


def test_everything_changed_leaves_nothing_shared(engine: Any) -> None:
    first, second = engine(), engine()
    for one in (first, second):
        one.memory.share_images("weights")
    second.seed = 2
    second.fill()
    second.cycle()
    assert second.right
    assert second.shared == 0
    assert files_open() == 11
    assert first.cycle() == 0
    assert first.right


def test_loading_through_images_writes_to_private_ones(engine: Any) -> None:
    first, second = engine(), engine()
    for one in (first, second):
        one.memory.share_images("weights")
    second.seed = 3
    with second.memory.load_through_images([second.weights]) as [staging]:
        assert second.shared == 0
        staging.copy_(second.expected())
    del staging
    assert second.cycle() == 0
    assert first.cycle() == 0
    assert first.right
    assert second.right


def test_nobody_can_write_to_a_shared_image(engine: Any) -> None:
    one = engine()
    assert one.memory.share_images("weights").private_bytes == 0
    own = [fd for fd, _ in open_memfds(os.getpid()) if "torpor-image-" in os.readlink(f"/proc/self/fd/{fd}")]
    assert len(own) == 11
    for fd in own:
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        writer = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(writer, b"x", 0)
        os.close(writer)
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)


def test_m8_a_discard_and_a_release_let_go(engine: Any) -> None:
    first, second = engine(), engine()
    for one in (first, second):
        one.memory.share_images("weights")
    assert first.memory.release_images("weights") == second.image
    assert first.memory.stats().host_committed_bytes == 0
    first.memory.check_integrity()
    second.memory.sleep({"weights": "discard"})
    second.memory.check_integrity()
    assert files_open() == 0


def test_a_closed_memory_lets_go_also_while_tensors_live(engine: Any) -> None:
    one = engine()
    one.memory.share_images("weights")
    one.memory.close()
    assert files_open() == 0
    assert one.right


def test_tensors_that_die_take_their_part_of_the_image_along(engine: Any) -> None:
    one = engine()
    pool = one.memory.pool("other")
    pool.reserve(4 * PIECE)
    kept, dies = pool.empty(PIECE, torch.uint8).fill_(7), pool.empty(2 * PIECE, torch.uint8).fill_(8)
    one.memory.share_images("other")
    del dies
    one.memory.sleep()
    one.memory.check_integrity()
    assert one.memory.stats().tag("other").shared_image_bytes == PIECE
    one.memory.wake()
    assert int(kept.min()) == int(kept.max()) == 7


# ---- what is found may be anything ---------------------------------------------------------------------------------------------


def _forge(keys: list[str], nbytes: int, *, seal: bool, size: int | None = None) -> list[int]:
    """Files with the right names and other bytes."""
    out = []
    for key in keys:
        fd = make_file(key, nbytes if size is None else size)
        if seal:
            out.append(seal_file(fd))
        out.append(fd)
    return out


@pytest.mark.parametrize("what", ["other bytes", "unfinished", "shorter"])
def test_m4_a_name_is_not_believed(engine: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    first, second = engine(), engine()
    keys: list[str] = []
    take = sharing.find_files
    monkeypatch.setattr(sharing, "find_files", lambda wanted: keys.extend(wanted) or take(wanted))
    first.memory.share_images("weights")
    first.memory.release_images("weights")
    forged = _forge(list(dict.fromkeys(keys)), PIECE, seal=what != "unfinished", size=CHUNK if what == "shorter" else None)
    try:
        report = second.memory.share_images("weights")
    finally:
        for fd in forged:
            os.close(fd)
    assert report.found_bytes == 0
    assert report.private_bytes == 0
    assert report.made_bytes == second.image
    assert ["does not hold" in problem for problem in report.problems] == ([True] if what == "other bytes" else [])
    assert second.cycle() == 0
    assert second.right


def test_what_is_found_and_gone_again_is_made(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = engine(), engine()
    first.memory.share_images("weights")
    monkeypatch.setattr(sharing, "open_found", lambda found, nbytes: None)
    assert second.memory.share_images("weights").made_bytes == second.image


def test_a_descriptor_that_means_another_file_by_now_is_not_taken() -> None:
    read, write = os.pipe()
    plain = os.open("/dev/null", os.O_RDONLY)
    try:
        for fd in (read, plain):
            assert open_found(image_files.Found(os.getpid(), fd), 0) is None
        assert open_found(image_files.Found(os.getpid(), 99_999), 0) is None
    finally:
        for fd in (read, write, plain):
            os.close(fd)
