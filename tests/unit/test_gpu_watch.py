"""tests/gpu/conftest.py: a GPU test that hangs costs its own file, and says where it hung. No GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPU_TESTS = ROOT / "tests" / "gpu"

HANGS = """
import ctypes
import threading
import time

import pytest

def a_lock_taken_twice():  # with the interpreter's lock held: no Python code runs any more, and no signal ends the wait
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)
    while True:
        libc.pthread_mutex_lock(mutex)

def test_before():
    pass

@pytest.fixture
def closing():
    yield
    a_lock_taken_twice()

def test_hangs():
    a_lock_taken_twice()

def test_fails_and_hangs_at_its_end(closing):
    raise AssertionError("and now it closes")

def test_waits():
    time.sleep(600)
"""


def run(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text((GPU_TESTS / "conftest.py").read_text().replace("HANG_S = 20.0", "HANG_S = 1.0"))
    (folder / "anywhere.py").write_text("import gpu_kit\n\ngpu_kit.why_not = lambda count: ''\n")
    (folder / "test_gpu_hangs.py").write_text(HANGS)
    path = os.pathsep.join([str(ROOT / "src"), str(GPU_TESTS), str(folder)])
    command = ["-m", "pytest", "-c", str(GPU_TESTS / "gpu.ini"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, *command, "-p", "anywhere", "-v", "test_gpu_hangs.py", "-k", name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_TIMEOUT": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("name", ["test_before or test_hangs", "test_fails_and_hangs_at_its_end"])
def test_native_code_that_hangs_ends_the_process_with_its_stacks(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, name)
    assert done.returncode == 1, done
    assert "in a_lock_taken_twice" in done.stderr
    assert "Timeout (0:00:02)!" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("test_gpu_hangs.py::")


def test_python_code_that_waits_too_long_fails_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "test_before or test_waits")
    assert "1 failed, 1 passed" in done.stdout
    assert "Timeout" not in done.stderr
