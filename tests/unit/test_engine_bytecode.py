"""A core process keeps compiled modules where the installation keeps none, and only in a folder that is its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torpor.engine import bytecode
from torpor.engine.bytecode import keep_bytecode


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation with one package that has no compiled modules, in an interpreter that writes none."""
    package = tmp_path / "installed" / "bare_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(bytecode, "_LARGEST", ("no_such_package", package.name))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    yield package
    sys.modules.pop(package.name, None)


def test_what_is_imported_then_is_kept_and_nothing_is_written_beside_it(bare: Path, tmp_path: Path) -> None:
    folder = keep_bytecode(tmp_path / "cache")
    assert folder == tmp_path / "cache" / "bytecode"
    assert folder.stat().st_mode & 0o777 == 0o700
    importlib.import_module(bare.name)
    assert [path.name.split(".")[0] for path in folder.rglob("*.pyc")] == ["__init__"]
    assert not (bare / "__pycache__").exists()
    assert keep_bytecode(tmp_path / "cache") is None, "a second call changes nothing"


def test_an_installation_that_has_its_own_is_left_alone(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    importlib.import_module(bare.name)
    assert keep_bytecode(tmp_path / "cache") is None
    assert sys.pycache_prefix is None
    assert not (tmp_path / "cache").exists()


def test_a_place_that_somebody_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "theirs"))
    assert keep_bytecode(tmp_path / "cache") is None
    assert sys.pycache_prefix == str(tmp_path / "theirs")


def test_a_folder_that_others_may_write_to_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "bytecode"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert keep_bytecode(tmp_path / "cache") is None
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert keep_bytecode(tmp_path / "cache") is None
    assert sys.pycache_prefix is None
    assert sys.dont_write_bytecode


def test_without_a_place_to_write_to_nothing_changes(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    assert keep_bytecode(tmp_path / "cache") is None
    assert sys.pycache_prefix is None
