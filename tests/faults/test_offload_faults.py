"""``offload`` when a copy fails, and when the engine is killed while it writes: answers stay right, nothing leaks, and what was
left behind is found."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torpor._native import Device, Op
from torpor.connectors.offload_disk import DiskShelf
from torpor.memory import Memory, MemoryConfig
from torpor.testing.engine import FakeWorker

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from store_driver import LONG, OTHER, StoreDriver, told

BLOCK = 4096
NAMES = [bytes([i]) * 32 for i in range(1, 200)]
WRITER = """
import sys
from pathlib import Path
from torpor.connectors.offload_disk import DiskShelf
shelf = DiskShelf(Path(sys.argv[1]), 1 << 20, 4096)
shelf.open(bytes(32))
print("up", flush=True)
while True:
    for i in range(1, 200):
        shelf.write(bytes([i]) * 32, memoryview(bytes([i]) * 4096))
    shelf.use(bytes(32))
    for path in list(shelf._present.iterdir()):
        path.unlink()
    shelf.use(bytes(32))
"""


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("while_it", ["saves", "loads"])
def test_a_copy_that_fails_costs_what_it_would_have_brought(tmp_path: Path, nth: int, while_it: str) -> None:
    device = Device.open("host", faults=True)
    memory = Memory(MemoryConfig(driver="host", extent_bytes=1 << 20), device=device)
    engine = StoreDriver(extra={"disk_dir": str(tmp_path / "kv")}, worker=FakeWorker(memory))
    try:
        if while_it == "loads":
            engine.answer("before", prompt=LONG)
            engine.forget()
        device.arm_fault(Op.COPY, nth)
        for name, prompt in (("a", LONG), ("b", OTHER)):
            assert engine.answer(name, prompt=prompt) == told(prompt)
        device.clear_faults()
        engine.forget()
        for name, prompt in (("c", LONG), ("d", OTHER)):
            assert engine.answer(name, prompt=prompt) == told(prompt)
        engine.core.scheduler.check_integrity()
        assert engine.core.stats().cache.allocated_blocks == 0
    finally:
        engine.close()
        device.close()


def test_a_killed_engine_s_leftovers_are_found_and_no_block_is_wrong(tmp_path: Path) -> None:
    leftovers = 0
    for round_ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "kv")], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"up\n"
        time.sleep(0.01 + 0.007 * round_)
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
        shelf = DiskShelf(tmp_path / "kv", 1 << 20, BLOCK)
        shelf.open(bytes(32))  # the lock went with the process
        present = [name for name in NAMES if name in shelf]
        for name in present:
            into = bytearray(BLOCK)
            assert shelf.read(name, memoryview(into))
            assert into == name[:1] * BLOCK
        assert sorted(p.name for p in shelf._present.iterdir()) == sorted(f"{n.hex()}.block" for n in present)
        leftovers += shelf.leftovers
        shelf.close()
    assert leftovers <= 6, "at most the one file that was being written"


def test_what_a_killed_engine_was_writing_is_counted(tmp_path: Path) -> None:
    """Killed inside the write of a file that never ends: a pipe stands for a slow disk."""
    script = """
import sys, os
from pathlib import Path
from torpor.connectors import offload_disk
from torpor.connectors.offload_disk import DiskShelf
plain = offload_disk._write_new
def slow(path, parts):
    plain(path, parts[:1])
    print("half", flush=True)
    sys.stdin.read()
offload_disk._write_new = slow
shelf = DiskShelf(Path(sys.argv[1]), 1 << 20, 4096)
shelf.open(bytes(32))
shelf.write(bytes([1]) * 32, memoryview(bytes(4096)))
"""
    writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "kv")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdin is not None
    assert writer.stdout.readline() == b"half\n"
    writer.kill()
    writer.wait(10)
    writer.stdout.close()
    writer.stdin.close()
    shelf = DiskShelf(tmp_path / "kv", 1 << 20, BLOCK)
    shelf.open(bytes(32))
    assert (shelf.leftovers, len(shelf)) == (1, 0)
    assert not list(shelf._present.iterdir())
    shelf.close()
