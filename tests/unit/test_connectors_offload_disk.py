"""``offload`` on disk: files outlive the engine, a file that is not right is a miss and never wrong bytes, and a disk that fails
costs what it would have kept and nothing else."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_pairs import WAIT_S
from store_driver import LONG, OTHER, StoreDriver, told

from torpor.connectors import offload_disk
from torpor.connectors.offload import OffloadStore
from torpor.connectors.offload_disk import HEADER_BYTES, DiskShelf
from torpor.connectors.store_names import root_of
from torpor.errors import ConfigurationError
from torpor.testing.kv_engine import SMALL_SPEC

BLOCK = 64
FILE = BLOCK + HEADER_BYTES
ROOT = bytes(range(32))
NAMES = [bytes([i]) * 32 for i in range(1, 20)]


def content(index: int) -> memoryview:
    return memoryview(bytes([index] * BLOCK))


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[DiskShelf]:
    shelf = DiskShelf(tmp_path / "kv", 4 * FILE, BLOCK)
    shelf.open(ROOT)
    yield shelf
    shelf.close()


def read(shelf: DiskShelf, name: bytes) -> bytes | None:
    into = bytearray(BLOCK)
    return bytes(into) if shelf.read(name, memoryview(into)) else None


def file_of(shelf: DiskShelf, name: bytes) -> Path:
    return shelf._path(name)


class TestFiles:
    def test_what_was_written_is_read(self, shelf: DiskShelf) -> None:
        assert shelf.write(NAMES[0], content(1))
        assert read(shelf, NAMES[0]) == bytes(content(1))
        assert file_of(shelf, NAMES[0]).stat().st_size == FILE
        assert file_of(shelf, NAMES[0]).stat().st_mode & 0o077 == 0
        assert (len(shelf), shelf.used_bytes) == (1, FILE)

    def test_it_outlives_the_shelf(self, shelf: DiskShelf, tmp_path: Path) -> None:
        shelf.write(NAMES[0], content(1))
        shelf.close()
        later = DiskShelf(tmp_path / "kv", 4 * FILE, BLOCK)
        later.open(ROOT)
        assert NAMES[0] in later
        assert read(later, NAMES[0]) == bytes(content(1))
        later.close()

    def test_the_cap_holds_and_the_oldest_go(self, shelf: DiskShelf) -> None:
        for index in range(4):
            shelf.write(NAMES[index], content(index))
        shelf.touch(NAMES[:1])
        shelf.write(NAMES[4], content(4))
        assert [name in shelf for name in NAMES[:5]] == [True, False, True, True, True]
        assert len(list(shelf._present.iterdir())) == 4
        assert shelf.evicted == 1

    def test_a_smaller_cap_holds_from_the_start(self, shelf: DiskShelf, tmp_path: Path) -> None:
        for index in range(4):
            shelf.write(NAMES[index], content(index))
            os.utime(file_of(shelf, NAMES[index]), (1000 + index, 1000 + index))
        shelf.close()
        later = DiskShelf(tmp_path / "kv", 2 * FILE, BLOCK)
        later.open(ROOT)
        assert [name in later for name in NAMES[:4]] == [False, False, True, True]
        later.close()

    def test_two_engines_cannot_have_one_folder(self, shelf: DiskShelf, tmp_path: Path) -> None:
        other = DiskShelf(tmp_path / "kv", 4 * FILE, BLOCK)
        with pytest.raises(ConfigurationError, match="another engine") as caught:
            other.open(ROOT)
        assert caught.value.fields["setting"] == "disk_dir"
        shelf.close()
        other.open(ROOT)
        other.close()


def cut(path: Path) -> None:
    os.truncate(path, FILE - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flip(at: int) -> Callable[[Path], None]:
    def flipped(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    flipped.__name__ = f"flip_{at}"
    return flipped


def link(path: Path) -> None:
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def gone(path: Path) -> None:
    path.unlink()


def another(path: Path) -> None:
    """The whole file of another block, right in itself, under this one's name."""
    shutil.copy(path.with_name(f"{NAMES[1].hex()}.block"), path)


DAMAGES = [cut, emptied, longer, flip(0), flip(11), flip(20), flip(60), flip(HEADER_BYTES), flip(FILE - 1), another]
STRANGE = [link, pipe, folder, gone]


def test_every_field_of_the_layout_is_in_the_names() -> None:
    changes = [{"num_layers": 1}, {"block_size": 8}, {"num_kv_heads": 1}, {"head_dim": 4}, {"dtype": "bfloat16"}]
    specs = [SMALL_SPEC, *(dataclasses.replace(SMALL_SPEC, **change) for change in changes)]
    assert len({root_of("v", spec) for spec in specs} | {root_of("w", SMALL_SPEC)}) == len(specs) + 1
    assert root_of("v", dataclasses.replace(SMALL_SPEC, num_blocks=1)) == root_of("v", SMALL_SPEC)


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES + STRANGE)
    def test_it_is_a_miss(self, shelf: DiskShelf, damage: Callable[[Path], None]) -> None:
        for index in range(2):
            shelf.write(NAMES[index], content(index))
        damage(file_of(shelf, NAMES[0]))
        into = bytearray(b"?" * BLOCK)
        assert not shelf.read(NAMES[0], memoryview(into))
        assert into == b"?" * BLOCK, "nothing of it is let in"
        assert NAMES[0] not in shelf
        assert read(shelf, NAMES[1]) == bytes(content(1))
        assert shelf.bad + shelf.errors == (damage is not gone)

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_what_was_removed_can_be_written_again(self, shelf: DiskShelf, damage: Callable[[Path], None]) -> None:
        for index in range(2):
            shelf.write(NAMES[index], content(index))
        damage(file_of(shelf, NAMES[0]))
        read(shelf, NAMES[0])
        assert shelf.write(NAMES[0], content(0))
        assert read(shelf, NAMES[0]) == bytes(content(0))

    @pytest.mark.parametrize("damage", [*DAMAGES, *STRANGE])
    def test_a_later_engine_does_not_take_it_in_or_finds_it_wrong(
        self, shelf: DiskShelf, tmp_path: Path, damage: Callable[[Path], None]
    ) -> None:
        for index in range(2):
            shelf.write(NAMES[index], content(index))
        damage(file_of(shelf, NAMES[0]))
        shelf.close()
        later = DiskShelf(tmp_path / "kv", 4 * FILE, BLOCK)
        later.open(ROOT)
        assert read(later, NAMES[0]) is None
        assert read(later, NAMES[1]) == bytes(content(1))
        later.close()

    def test_what_a_killed_engine_left_is_removed_and_counted(self, shelf: DiskShelf, tmp_path: Path) -> None:
        shelf.write(NAMES[0], content(0))
        (shelf._present / f"{NAMES[1].hex()}.part").write_bytes(b"half")
        stranger = shelf._present / "notes.txt"
        stranger.write_text("somebody's own")
        shelf.close()
        later = DiskShelf(tmp_path / "kv", 4 * FILE, BLOCK)
        later.open(ROOT)
        assert (later.leftovers, later.bad, len(later)) == (1, 0, 1)
        assert sorted(p.name for p in later._present.iterdir()) == sorted([f"{NAMES[0].hex()}.block", "notes.txt"])
        later.close()

    def test_files_of_other_weights_are_removed_and_what_is_not_ours_stays(self, shelf: DiskShelf, tmp_path: Path) -> None:
        for index in range(3):
            shelf.write(NAMES[index], content(index))
        old = shelf._present
        (old / "notes.txt").write_text("somebody's own")
        (tmp_path / "kv" / "kv-folder").mkdir()
        shelf.use(bytes(32))
        assert (len(shelf), shelf.leftovers) == (0, 3)
        assert sorted(p.name for p in old.iterdir()) == ["notes.txt"]
        assert (tmp_path / "kv" / "kv-folder").is_dir()
        assert read(shelf, NAMES[0]) is None


class TestAFailingDisk:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
    def test_it_is_counted_and_told_once_and_tried_again(
        self, shelf: DiskShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
    ) -> None:
        plain = offload_disk._write_new

        def fail(path: Path, parts: Any) -> None:
            plain(path, parts[:1])  # what was written so far is there
            raise OSError(number, os.strerror(number))

        caplog.set_level(logging.INFO, logger=offload_disk.__name__)
        monkeypatch.setattr(offload_disk, "_write_new", fail)
        assert not any(shelf.write(name, content(1)) for name in NAMES[:3])
        assert (shelf.errors, len(shelf)) == (3, 0)
        assert not list(shelf._present.iterdir())
        assert [os.strerror(number) in r.message for r in caplog.records] == [True]
        monkeypatch.setattr(offload_disk, "_write_new", plain)
        assert shelf.write(NAMES[0], content(1))
        assert "again" in caplog.records[-1].message
        assert read(shelf, NAMES[0]) == bytes(content(1))

    def test_a_file_that_cannot_be_removed_keeps_its_place(self, shelf: DiskShelf, monkeypatch: pytest.MonkeyPatch) -> None:
        """The cap is of what is there, not of what is known."""
        for index in range(4):
            shelf.write(NAMES[index], content(index))

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(errno.EPERM, "told to fail")

        monkeypatch.setattr(Path, "unlink", refuse)
        assert not shelf.write(NAMES[4], content(4))
        assert (len(shelf), shelf.errors) == (4, 1)
        monkeypatch.undo()
        assert shelf.write(NAMES[4], content(4))
        assert len(shelf) == 4


class Engines:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: list[StoreDriver] = []

    def start(self, host_blocks: int = 100, **settings: Any) -> StoreDriver:
        extra = {"host_bytes": host_blocks * BLOCK, "disk_dir": str(self.folder)} | settings.pop("extra", {})
        self.open.append(StoreDriver(extra=extra, **settings))
        return self.open[-1]

    def restart(self, **settings: Any) -> StoreDriver:
        self.open.pop().close()
        return self.start(**settings)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path / "kv")
    yield engines
    for engine in engines.open:
        engine.close()


def written(engine: StoreDriver, blocks: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while engine.figures.disk_blocks < blocks and time.monotonic() < deadline:
        time.sleep(0.002)
    assert engine.figures.disk_blocks == blocks


class TestEngines:
    def test_kept_kv_survives_the_engine(self, engines: Engines) -> None:
        engines.start().answer("a", prompt=LONG)
        later = engines.restart()
        assert later.figures.disk_blocks == 10
        assert later.answer("b", prompt=LONG) == told(LONG)
        assert later.cached("b") == 40
        assert later.figures.host_blocks == 10, "what was read from disk is in host memory again"

    def test_kept_kv_survives_a_sleep_on_disk_alone(self, engines: Engines) -> None:
        engine = engines.start(host_blocks=10)
        engine.answer("a", prompt=LONG)
        written(engine, 10)
        engine.answer("b", prompt=OTHER)
        written(engine, 20)
        engine.forget()
        assert engine.answer("c", prompt=LONG) == told(LONG)
        assert engine.cached("c") == 40
        assert engine.figures.host_blocks == 10

    def test_e6_an_engine_with_other_weights_finds_nothing(self, engines: Engines) -> None:
        engines.start().answer("a", prompt=LONG)
        later = engines.restart(model_id="fake@2")
        assert (later.figures.disk_blocks, later.figures.leftover_files) == (0, 10)
        later.answer("b", prompt=LONG)
        assert later.cached("b") == 0
        again = engines.restart()
        assert again.answer("c", prompt=LONG) == told(LONG)
        assert again.cached("c") == 0, "it ended with the other weights"

    def test_e6_an_update_of_the_weights_removes_the_files(self, engines: Engines) -> None:
        engine = engines.start()
        engine.answer("a", prompt=LONG)
        written(engine, 10)
        engine.core.set_weights_version("fake@2")
        assert engine.figures.disk_blocks == 0
        assert not list(engines.folder.glob("*/*"))

    def test_e6_a_disk_that_is_gone_does_not_hinder_an_update(self, engines: Engines) -> None:
        engine = engines.start()
        engine.answer("a", prompt=LONG)
        written(engine, 10)
        shutil.rmtree(engines.folder)
        engines.folder.write_text("something else")
        engine.core.set_weights_version("fake@2")
        assert (engine.figures.disk_blocks, engine.figures.host_blocks) == (0, 0)
        engine.answer("b", prompt=LONG)
        assert engine.cached("b") == 0
        engine.forget()
        engine.answer("c", prompt=LONG)
        assert engine.cached("c") == 40, "host memory goes on"

    def test_another_layout_finds_nothing(self, engines: Engines) -> None:
        from torpor.testing.engine import FakeWorker

        engines.start().answer("a", prompt=LONG)
        later = engines.restart(worker=FakeWorker(block_size=8), host_blocks=200)
        assert later.answer("b", prompt=LONG) == told(LONG)
        assert later.cached("b") == 0

    @pytest.mark.parametrize("damage", [d for d in [*DAMAGES, *STRANGE] if d is not another])
    def test_damaged_files_cost_time_and_nothing_else(self, engines: Engines, damage: Callable[[Path], None]) -> None:
        engine = engines.start(host_blocks=10)
        engine.answer("a", prompt=LONG)
        written(engine, 10)
        engine.answer("b", prompt=OTHER)
        written(engine, 20)
        assert isinstance(engine.store, OffloadStore)
        assert engine.store._disk is not None
        for name in engine.store._names.of(LONG)[3:5]:
            damage(file_of(engine.store._disk, name))
        engine.forget()
        assert engine.answer("c", prompt=LONG) == told(LONG)
        engine.forget()
        assert engine.answer("d", prompt=LONG) == told(LONG)
        assert engine.side.stats().loads_failed <= 2

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
    def test_a_disk_that_is_full_or_forbidden_leaves_the_engine_as_it_is(
        self, engines: Engines, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def fail(path: Path, parts: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(offload_disk, "_write_new", fail)
        engine = engines.start()
        assert engine.answer("a", prompt=LONG) == told(LONG)
        engine.forget()
        assert engine.answer("b", prompt=LONG) == told(LONG)
        assert engine.cached("b") == 40, "host memory goes on"
        assert (engine.figures.disk_errors, engine.figures.disk_blocks) == (10, 0)

    def test_a_folder_that_is_removed_under_it(self, engines: Engines) -> None:
        engine = engines.start()
        engine.answer("a", prompt=LONG)
        written(engine, 10)
        shutil.rmtree(engines.folder)
        assert engine.answer("b", prompt=OTHER) == told(OTHER)
        engine.forget()
        assert engine.answer("c", prompt=LONG) == told(LONG)
        assert engine.figures.disk_errors == 10

    def test_what_is_removed_to_make_room_on_the_disk_is_made_again(self, engines: Engines) -> None:
        engine = engines.start()
        engine.answer("a", prompt=LONG)
        written(engine, 10)
        for folder in engines.folder.glob("kv-*"):
            shutil.rmtree(folder)
        assert engine.answer("b", prompt=OTHER) == told(OTHER)
        written(engine, 20)
        assert engine.figures.disk_errors == 0
        assert len(list(engines.folder.glob("kv-*/*.block"))) == 10

    def test_a_disk_that_was_away_during_an_update_is_used_when_it_is_back(self, engines: Engines) -> None:
        engine = engines.start()
        away = engines.folder.rename(engines.folder.with_name("away"))
        engine.core.set_weights_version("fake@2")
        away.rename(engines.folder)
        engine.answer("b", prompt=LONG)
        written(engine, 10)

    def test_blocks_that_wait_for_a_slow_disk_are_not_given_up(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = offload_disk._write_new

        def slow(path: Path, parts: Any) -> None:
            time.sleep(0.02)
            plain(path, parts)

        monkeypatch.setattr(offload_disk, "_write_new", slow)
        engine = engines.start(host_blocks=10)
        engine.answer("a", prompt=LONG)
        engine.answer("b", prompt=OTHER)
        assert engine.figures.skipped_blocks > 0
        engine.forget()
        assert engine.answer("c", prompt=LONG) == told(LONG)
        assert engine.answer("d", prompt=OTHER) == told(OTHER)

    def test_the_folder_of_a_living_engine_is_refused(self, engines: Engines) -> None:
        first = engines.start()
        with pytest.raises(ConfigurationError, match="in use by another engine"):
            engines.start(engine_id="second")
        assert first.answer("a", prompt=LONG) == told(LONG)
