"""A stand-in engine in a process of its own, driven by one JSON line a call."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

WAIT_S = 30.0


class ChildError(Exception):
    """What a call raised in the child: its type's name and message, and that of its cause."""


class Spares:
    """Interpreters that have imported all they need and wait to be told what to be: imports take most of a test's time."""

    def __init__(self) -> None:
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def keep(self, count: int) -> None:
        """From now on so many wait. 0: none, and those that do are ended."""
        self._count = count
        self._waiting += [self._start() for _ in range(count - len(self._waiting))]
        while len(self._waiting) > count:
            process = self._waiting.pop()
            process.kill()
            process.communicate()

    def take(self) -> subprocess.Popen[bytes]:
        process = self._waiting.pop(0) if self._waiting else self._start()
        self.keep(self._count)
        return process

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


SPARES = Spares()


class Child:
    """Started by the constructor; the first call waits until it is up. Always close it; a context manager."""

    def __init__(
        self,
        connector: str,
        engine_id: str,
        role: str,
        folder: Path,
        *,
        memory: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """``memory`` and ``spec``: fields of MemoryConfig and KVCacheSpec, for other ones than the stand-in engine's own."""
        options = {"socket_dir": str(folder / "kv")} if "pc" in connector else {}
        fields: dict[str, Any] = {"withdraw_timeout_s": 5.0, "lease_heartbeat_s": 1.0} | settings
        fields["extra"] = options | fields.get("extra", {})
        config = {"connector": connector, "engine_id": engine_id, "role": role} | fields
        self.process = SPARES.take()
        self._buffer = b""
        self._up = False
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"config": config, "memory": memory, "spec": spec}).encode() + b"\n")

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, name: str, *args: Any, timeout_s: float = WAIT_S) -> Any:
        self.begin(name, *args)
        return self.finish(timeout_s)

    def begin(self, name: str, *args: Any) -> None:
        assert self.process.stdin is not None
        self.wait_until_up()
        self.process.stdin.write(json.dumps([name, args]).encode() + b"\n")

    def wait_until_up(self) -> None:
        if not self._up:
            self.finish()
            self._up = True

    def finish(self, timeout_s: float = WAIT_S) -> Any:
        """The answer to ``begin``. TimeoutError, EOFError when the child died, ChildError."""
        answer = json.loads(self._line(timeout_s))
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer["result"]

    def send_signal(self, which: signal.Signals) -> None:
        """Stopped, every thread of it has stopped when this returns: on a busy machine one may go on for a while."""
        self.process.send_signal(which)
        while which is signal.SIGSTOP and any(state not in "TtZX" for state in self._thread_states()):
            time.sleep(0.001)

    def _thread_states(self) -> list[str]:
        stats = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return [stat.read_text(errors="replace").rpartition(")")[2].split()[0] for stat in stats]

    def death(self, timeout_s: float = WAIT_S) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.send_signal(signal.SIGCONT)
            try:
                self.call("close")
            except (ChildError, OSError, EOFError, TimeoutError):
                self.process.kill()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _line(self, timeout_s: float) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the child did not answer within {timeout_s} s")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise EOFError(f"the child ended ({self.process.wait(10)})")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def plain(value: Any) -> Any:
    return dataclasses.asdict(value) | {"held_bytes": value.held_bytes} if hasattr(value, "held_bytes") else value


def serve(out: Any) -> None:
    import torch

    from torpor.connectors import ConnectorConfig
    from torpor.kvcache.types import KVCacheSpec
    from torpor.memory import MemoryConfig
    from torpor.testing.kv_engine import SMALL_SPEC, KVEngine

    torch.cuda.is_available()  # loads the driver, takes no memory
    line = sys.stdin.readline()
    if not line:
        return
    settings = json.loads(line)

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer, default=str) + "\n")
        out.flush()

    spec = KVCacheSpec(**settings["spec"]) if settings["spec"] else SMALL_SPEC
    memory = MemoryConfig(**settings["memory"]) if settings["memory"] else None
    with KVEngine(ConnectorConfig(**settings["config"]), spec, memory=memory) as engine:
        say({"result": "up"})
        for line in sys.stdin:
            name, args = json.loads(line)
            try:
                if name == "block_sums":
                    result = [zlib.crc32(engine.block(b)) for b in range(engine.spec.num_blocks)]
                else:
                    result = plain(getattr(engine, name)(*args))
            except Exception as error:
                cause = f" < {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
                say({"error": f"{type(error).__name__}: {error}{cause}"})
            else:
                say({"result": result if isinstance(result, (dict, str, int, bool, list)) else None})
            if name == "close":
                return


if __name__ == "__main__":
    # Native libraries print to stdout; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(answers)
