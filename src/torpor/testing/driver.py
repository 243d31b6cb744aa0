"""Failing drivers and leak checks for tests of anything that sits on ``torpor.memory`` or ``torpor._native``.

for fault in every_fault([Op.CREATE, Op.MAP]):      # the 1st, 2nd, ... call of each fails, until no run makes that many
    memory = build(fault.device)
    with fault:                                     # armed from here ...
        exercise(memory)                            # ... to here
    check(memory)
    memory.close()
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator, Sequence
from types import TracebackType

from torpor._native import Device, Op
from torpor.engine import collector
from torpor.errors import TorporError
from torpor.memory.procfs import open_memfds, pinned_bytes, read_mappings


class Fault:
    """The ``nth`` call of ``op`` fails, and the ``count - 1`` after it, counted from where the ``with`` block begins."""

    def __init__(self, device: Device, op: Op, nth: int = 1, count: int = 1) -> None:
        self.device = device
        self.op = op
        self.nth = nth
        self.count = count
        self.reached = False  # the block made that call

    def __enter__(self) -> Fault:
        self._calls_before = self.device.fault_calls(self.op)
        self.device.arm_fault(self.op, self.nth, self.count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.device.clear_faults()
        self.reached = self.device.fault_calls(self.op) - self._calls_before >= self.nth

    def __str__(self) -> str:
        return f"{self.op.name.lower()} call {self.nth}" + (f" and {self.count - 1} more" if self.count > 1 else "")


def every_fault(ops: Sequence[Op] = tuple(Op), *, driver: str = "host", count: int = 1) -> Iterator[Fault]:
    """One fault after another, each on a device of its own that is closed after the loop's body: for every operation the 1st,
    2nd, ... call, until a body does not reach it. A body that never enters the fault ends its operation. No garbage is collected
    meanwhile: an error must not keep what it leaves behind in a ring of references."""
    for op in ops:
        for nth in itertools.count(1):
            device = Device.open(driver, faults=True)
            fault = Fault(device, op, nth, count)
            try:
                with collector.paused():
                    yield fault
            except BaseException:
                with contextlib.suppress(TorporError):  # what the body left open must not hide why it failed
                    device.close()
                raise
            device.close()
            if not fault.reached:
                break


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """AssertionError when the block leaves memory files mapped or open, other descriptors, or pinned pages behind."""
    before = _footprint()
    yield
    if _grown(before):
        gc.collect()  # what only a cycle keeps is no leak
    grown = _grown(before)
    assert not grown, f"leaked (before, after): {grown}"


def _grown(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    after = _footprint()
    return {name: (before[name], after[name]) for name in before if after[name] > before[name]}


def _footprint() -> dict[str, int]:
    memfds = [inode for _, inode in open_memfds(os.getpid())]
    devices = {device for device, _ in memfds}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "open memory files": len(memfds),
        "mapped memory files": sum(m.permissions.endswith("s") and m.inode[0] in devices for m in read_mappings()),
        "pinned bytes": pinned_bytes(),
    }
