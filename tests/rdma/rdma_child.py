"""An object in a process of its own, forked from this one: under emulation ``import torch`` takes half a minute, so it is done
once.

Nothing that has threads or talks to a device may be loaded before the fork: NIXL and the verbs are opened in the children only.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch  # noqa: F401  before the fork

WAIT_S = 60.0
_fork = multiprocessing.get_context("fork")


class ChildError(Exception):
    """What a call raised in the child, as text."""


class Child:
    """``make()`` is called in the child; ``call(name, ...)`` calls a method of what it returned. Arguments and results are
    pickled."""

    def __init__(self, make: Callable[[], Any], limit_s: float = WAIT_S) -> None:
        self._pipe, theirs = _fork.Pipe()
        self.process = _fork.Process(target=_serve, args=(theirs, self._pipe, make), daemon=True)
        self.process.start()
        theirs.close()
        self.finish(limit_s)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def call(self, name: str, *args: Any, limit_s: float = WAIT_S, **options: Any) -> Any:
        self.begin(name, *args, **options)
        return self.finish(limit_s)

    def begin(self, name: str, *args: Any, **options: Any) -> None:
        self._pipe.send((name, args, options))

    def finish(self, limit_s: float = WAIT_S) -> Any:
        """TimeoutError, EOFError when the child died, ChildError."""
        if not self._pipe.poll(limit_s):
            raise TimeoutError(f"the child did not answer within {limit_s:g} s")
        good, answer = self._pipe.recv()
        if not good:
            raise ChildError(answer)
        return answer

    def send_signal(self, which: signal.Signals) -> None:
        os.kill(self.pid, which)

    def close(self) -> None:
        if self.process.is_alive():
            self.send_signal(signal.SIGCONT)
            try:
                self.call("close", limit_s=20)
            except (ChildError, OSError, EOFError, TimeoutError):
                self.process.kill()
        self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, parents: Connection, make: Callable[[], Any]) -> None:
    parents.close()
    served: Any = None
    name = ""
    try:
        served = make()
        pipe.send((True, None))
        while name != "close":
            name, args, options = pipe.recv()
            try:
                pipe.send((True, getattr(served, name)(*args, **options)))
            except Exception as error:
                cause = f" < {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
                pipe.send((False, f"{type(error).__name__}: {error}{cause}"))
    except EOFError:
        pass  # the test is gone
    except Exception:
        pipe.send((False, traceback.format_exc()))
