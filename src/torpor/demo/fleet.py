"""The processes of the demo: engines and a router as a person would start them from shells, each with its log in one folder."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from torpor.errors import EngineDeadError, PeerError

Say = Callable[[str], None]
STOP_S = 20.0
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 10_000


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """That nobody listens at, for processes that are started later, or again. Where it can be, outside the range from which the
    kernel takes ports for connections: one of those would have them meanwhile."""
    with contextlib.ExitStack() as held:
        return [_bind_somewhere(held.enter_context(socket.socket())) for _ in range(count)]


def _bind_somewhere(sock: socket.socket) -> int:
    low = int(EPHEMERAL.read_text(encoding="ascii").split()[0]) if EPHEMERAL.exists() else 0
    for _ in range(20 if low > FIRST_PORT else 0):
        with contextlib.suppress(OSError):  # somebody has it
            sock.bind(("127.0.0.1", random.SystemRandom().randrange(FIRST_PORT, low)))
            return int(sock.getsockname()[1])
    sock.bind(("127.0.0.1", 0))
    return int(sock.getsockname()[1])


@dataclass
class Service:
    """One child process with an HTTP door on loopback."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def death(self) -> str:
        """How it ended, in words: "killed by SIGSEGV", "exit code 2"."""
        code = self.process.poll()
        if code is None:
            return "alive"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Fleet:
    """Starts services, waits for them by name, and stops all of them on exit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: list[Service] = []
        # The services are on loopback, where no proxy of the environment's can reach them.
        self.http = httpx.Client(timeout=httpx.Timeout(120.0, connect=5.0), trust_env=False)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self.http.close()

    def start(self, name: str, arguments: Sequence[str], port: int | None = None) -> Service:
        """On a free port, unless one is given: for a service that takes another's place."""
        port = port or free_port()
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", "torpor", *arguments, "--host", "127.0.0.1", "--port", str(port)]
        with log.open("ab") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        service = Service(name, process, f"http://127.0.0.1:{port}", log)
        self._services.append(service)
        return service

    def wait_ready(self, service: Service, timeout_s: float, say: Say) -> None:
        """Blocks until the service says it is ready. EngineDeadError when it dies first, PeerError in time."""
        started = told = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if not service.is_alive():
                raise EngineDeadError(f"{service.name} ended at start-up ({service.death()})")
            try:
                if self.http.get(f"{service.url}/ready", timeout=2.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() - told > 5:
                told = time.monotonic()
                say(f"waiting for {service.name} to load ({told - started:.0f} s)")
            time.sleep(0.1)
        raise PeerError(f"{service.name} was not ready after {timeout_s:.0f} s", peer=service.name)

    def last_words(self) -> str:
        """The end of every service's log, for when something went wrong: of one that died more, its stacks may be there."""
        return "\n".join(f"---- {s.name} ({s.death()})\n{s.tail(15 if s.is_alive() else 80)}" for s in self._services)

    def stop(self) -> None:
        for service in reversed(self._services):
            if service.is_alive():
                service.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for service in self._services:
            try:
                service.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()
        self._services.clear()
