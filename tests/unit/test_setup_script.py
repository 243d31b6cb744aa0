"""scripts/setup, up to the point where it would install something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "{}.{}.{}".format(*sys.version_info)
# Is the interpreter it stands for, but notes what it was told to make of .venv, and makes nothing.
INTERPRETER = """#!/bin/sh
if [ "$1" = -m ] && [ "$2" = venv ]; then shift 2; echo "$@" >made; exit 3; fi
exec "{python}" "$@"
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What scripts/setup looks at. Nothing is installed: apt-get does nothing here, and pip neither where it is asked."""
    for folder in ("scripts", "csrc", "src/torpor/_native"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("scripts/setup", "scripts/requirements.py", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    executable(tmp_path / "bin/apt-get", "#!/bin/sh\n")
    executable(tmp_path / "python", INTERPRETER.format(python=sys.executable))
    return tmp_path


def set_up(tree: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(tree / "python"), "PATH": f"{tree}/bin{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([tree / "scripts/setup"], env=environment, capture_output=True, text=True, timeout=60)


def virtual_environment(tree: Path, noted: str, python: str) -> None:
    executable(tree / ".venv/bin/python", f"#!/bin/sh\n{python}\n")
    (tree / ".venv/pyvenv.cfg").write_text(f"home = /somewhere\n{noted.format(VERSION)}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("noted", "made"),
    [(None, ".venv"), ("version = 2.7.18", "--clear .venv"), ("version = {}", ""), ("version_info = {}.final.0", "")],
)
def test_the_environment_is_of_the_interpreter_that_was_named(tree: Path, noted: str | None, made: str) -> None:
    """One that is left from another would run everything with that other, and say nothing."""
    if noted is not None:
        virtual_environment(tree, noted, "exit 4")
    ran = set_up(tree)
    assert ran.returncode == (3 if made else 4), ran.stderr
    note = tree / "made"
    assert (note.read_text(encoding="utf-8").strip() if note.exists() else "") == made


def test_a_native_core_that_was_built_in_the_tree_does_not_hide_the_new_one(tree: Path) -> None:
    """scripts/build leaves one there, which is found first: after a change in csrc/ the demo and the server would run the old."""
    virtual_environment(tree, "version = {}", f'[ "$2" = pip ] || exec "{sys.executable}" "$@"')
    old = tree / "src/torpor/_native/libtorpor_native.so"
    old.write_bytes(b"old")
    ran = set_up(tree)
    assert ran.returncode == 0, ran.stderr
    assert not old.exists()
    old.write_bytes(b"built since")
    assert set_up(tree).returncode == 0
    assert old.exists()
