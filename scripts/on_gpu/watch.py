"""A child process under a limit. One that is stopped leaves in its log where all its threads, and its children's, were."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

GRACE_S = 3.0
POLL_S = 0.05


class Watched:
    """Starts ``command`` in a session of its own. ``wait`` must follow."""

    def __init__(self, command: Sequence[str], output: int, environment: Mapping[str, str], cwd: Path) -> None:
        self.ended_early = False
        self._end = threading.Event()
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, "PYTHONFAULTHANDLER": "1"},  # at SIGABRT every Python process writes its stacks
            start_new_session=True,
        )

    def end_early(self) -> None:
        """``wait`` stops it now. From any thread, or a signal handler."""
        self.ended_early = True
        self._end.set()

    def wait(self, limit_s: float) -> int | None:
        """The exit status; None when it had to be stopped. Nothing that it started lives on, also after a regular end: an engine
        left behind would hold the next part's memory."""
        ends = time.monotonic() + limit_s
        while self._process.poll() is None and time.monotonic() < ends and not self._end.wait(POLL_S):
            pass
        status = self._process.poll()
        if status is None:
            self._stop()
        self._reap()
        return status

    def _stop(self) -> None:
        """Its children first, with their stacks: then it says itself what it waited for, and sums up. Native code that hangs
        hears no SIGINT: its own stacks follow."""
        leader = self._process.pid
        for pid in set(members(leader)) - {leader}:
            _send(pid, signal.SIGABRT)
        self._wait_end(GRACE_S / 3)
        _send(leader, signal.SIGINT)
        self._wait_end(GRACE_S)
        for pid in members(leader):
            _send(pid, signal.SIGABRT)
        self._wait_end(GRACE_S)

    def _wait_end(self, most_s: float) -> None:
        ends = time.monotonic() + most_s
        while self._process.poll() is None and time.monotonic() < ends:
            time.sleep(POLL_S)

    def _reap(self) -> None:
        leader = self._process.pid
        for sign in (signal.SIGTERM, signal.SIGKILL):
            ends = time.monotonic() + GRACE_S
            for pid in members(leader):
                _send(pid, sign)
            while members(leader) and time.monotonic() < ends:
                time.sleep(POLL_S)
                self._process.poll()
        self._process.wait()


def members(session: int) -> list[int]:
    """The processes of a session, without those that are dead and only not reaped."""
    return [pid for pid, state, of in _processes() if of == session and state not in "ZX"]


def _processes() -> Iterator[tuple[int, str, int]]:
    """(pid, state, session) of all."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            yield int(name), fields[0], int(fields[3])


def _send(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def no_core_files() -> None:
    """Of what this process starts: stacks are worth more, and the image of a process with a GPU is large."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
