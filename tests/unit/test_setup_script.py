"""scripts/setup, up to the point where it would install something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("git")), reason="it would install a compiler and git first")
@pytest.mark.parametrize(
    ("venv_of", "made"),
    [(None, ".venv"), ("version = 2.7.18", "--clear .venv"), ("version = {}", ""), ("version_info = {}.final.0", "")],
)
def test_the_environment_is_of_the_interpreter_that_was_named(tmp_path: Path, venv_of: str | None, made: str) -> None:
    """One that is left from another would run everything with that other, and say nothing."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "scripts/requirements.py", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc").mkdir()
    if venv_of is not None:
        executable(tmp_path / ".venv/bin/python", "#!/bin/sh\nexit 4\n")
        noted = venv_of.format("{}.{}.{}".format(*sys.version_info))
        (tmp_path / ".venv/pyvenv.cfg").write_text(f"home = /somewhere\n{noted}\n", encoding="utf-8")
    python = executable(tmp_path / "python", INTERPRETER.format(python=sys.executable))
    ran = subprocess.run(
        [tmp_path / "scripts/setup"], env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == (3 if made else 4), ran.stderr
    note = tmp_path / "made"
    assert (note.read_text(encoding="utf-8").strip() if note.exists() else "") == made
