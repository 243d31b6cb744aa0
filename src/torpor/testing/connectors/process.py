"""A suite engine in a process of its own, driven by one JSON line a call."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from torpor.kvcache.types import KVCacheSpec
from torpor.testing.connectors.outcomes import Failure

START_S = 60.0
# A terminal's Ctrl-C is the parent's to obey, also while the child imports: it ends its children.
MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {path!r}; "
    "from torpor.testing.connectors.process import main; main({quiet})"
)


class EngineError(Exception):
    """What a call of an engine raised, in one line with its cause."""


class Worker:
    """An interpreter that has imported all it needs, and runs one engine at a time."""

    def __init__(self, patience: float = 1.0) -> None:
        """``patience``: how many times longer than usual its start may take."""
        self._start_s = START_S * patience
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAIN.format(path=sys.path, quiet=logging.root.manager.disable)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._buffer = b""
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> None:
        """Waits until its imports are done."""
        if not self._ready:
            self.answer(self._start_s)
            self._ready = True

    def ask(self, name: str, *args: Any) -> None:
        self.ready()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([name, args]).encode() + b"\n")
        except BrokenPipeError as error:
            raise Failure(self._obituary(name)) from error

    def answer(self, timeout_s: float, name: str = "start") -> Any:
        """EngineError for what the call raised; Failure when it does not end, or its process does."""
        found = json.loads(self._line(timeout_s, name))
        if "error" in found:
            raise EngineError(found["error"])
        return found["result"]

    def send_signal(self, which: signal.Signals) -> None:
        """Stopped, every thread of it has stopped when this returns: on a busy machine one may go on for a while."""
        self._process.send_signal(which)
        while which is signal.SIGSTOP and any(state not in "TtZX" for state in self._thread_states()):
            time.sleep(0.001)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _thread_states(self) -> list[str]:
        states = []
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                states.append(stat.read_text(errors="replace").rpartition(")")[2].split()[0])
        return states

    def _line(self, timeout_s: float, name: str) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failure(f"{name}() has not ended after {timeout_s:.0f} s in another process")
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise Failure(self._obituary(name))
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _obituary(self, name: str) -> str:
        status = self._process.wait(10)
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"the engine's process died during {name}() ({how})"


def main(quiet: int) -> None:
    """``quiet``: log records up to this level are dropped, as in the process that started this one."""
    logging.disable(quiet)
    # Native libraries print to stdout; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    serve(sys.stdin, answers)


def serve(calls: TextIO, answers: TextIO) -> None:
    """Runs until the calls end. ``open`` makes the engine, ``close`` ends it, anything else is a method of it."""
    from torpor.testing.connectors.engine import SuiteEngine, told
    from torpor.testing.connectors.subject import Subject

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def start(subject: dict[str, Any], role: str, engine_id: str, folder: str, spec: Any, settings: Any) -> SuiteEngine:
        shape = None if spec is None else KVCacheSpec(**spec)
        return SuiteEngine(Subject.from_wire(subject), role, engine_id, folder, shape, **settings)

    engine: SuiteEngine | None = None
    say({"result": "ready"})
    for line in calls:
        name, args = json.loads(line)
        try:
            if name == "open":
                engine, result = start(*args), None
            else:
                result = getattr(engine, name)(*args)
        except Exception as error:
            say({"error": told(error)})
        else:
            say({"result": result})
    if engine is not None:
        engine.close()
