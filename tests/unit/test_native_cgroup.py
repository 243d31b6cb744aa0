"""Not enough memory in a cgroup is an error before anything is touched, never the kernel's OOM killer."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
LIMIT = 192 << 20

PROGRAM = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from torpor._native import Device
from torpor.errors import DeviceMemoryError, HostMemoryError
with Device.open("host") as device:
    region = device.create_region(16 << 20, extent_bytes=4 << 20)
    device.unmap([region])
    with device.create_arena(1 << 30) as arena:
        try:
            arena.commit(0, 1 << 30)
        except HostMemoryError as error:
            assert error.bytes_needed == 1 << 30 and 0 < error.bytes_free < int(sys.argv[2]), error
            print("host memory refused")
        arena.commit(0, 16 << 20)
    try:
        device.create_region(1 << 30, extent_bytes=64 << 20)
    except DeviceMemoryError as error:
        assert error.bytes_needed == 1 << 30 and 0 < error.bytes_free < int(sys.argv[2]), error
        print("device memory refused")
    device.map([region])
    region.destroy()
"""

AHEAD = """
import sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from torpor._native import Device
with Device.open("host") as device, device.create_arena(1 << 30) as one, device.create_arena(1 << 30) as other:
    for arena in one, other:
        arena.commit_ahead(0, 120 << 20, 256 << 10)
    for arena in one, other:
        while arena.ahead().active:
            time.sleep(0.01)
    print(*(arena.ahead().failure.split(":")[0] for arena in (one, other) if arena.ahead().failure))
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    name = f"torpor-test-{uuid.uuid4().hex[:8]}"
    v1 = (V1 / "memory.limit_in_bytes").exists()
    folder = (V1 if v1 else V2) / name
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(LIMIT))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"cannot make a memory cgroup here: {error}")
    yield folder
    folder.rmdir()


def run_in(cgroup: Path, program: str) -> str:
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", program, str(cgroup), str(LIMIT)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cgroup_limit_is_respected(cgroup: Path) -> None:
    assert run_in(cgroup, PROGRAM).split("\n") == ["host memory refused", "device memory refused", ""]


def test_those_who_take_memory_ahead_at_once_do_not_fill_the_cgroup(cgroup: Path) -> None:
    """Each has room when it begins, and both together have not."""
    assert "not enough host memory" in run_in(cgroup, AHEAD)
