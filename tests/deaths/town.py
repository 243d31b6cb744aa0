"""A small P/D pair with its router in real processes, each of which can be killed, stopped, and started again in its place."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from torpor.demo.fleet import Fleet, Service, free_port
from torpor.memory.procfs import open_memfds

sys.path.append(str(Path(__file__).parent.parent / "unit"))

START_S = 300.0  # six processes may share two cores with others
END_S = 20.0  # until a core without a server, or a server without a core, is gone
ENGINE = ["--enable-sleep-mode", "--dtype", "float32", "--threads", "1", "--num-blocks", "192", "--block-size", "4"]
ENGINE += ["--max-num-batched-tokens", "64", "--no-prefix-caching", "--log-level", "warning"]
# Short, so that a round takes seconds: what a peer's silence may cost.
WAITS = [
    "--withdraw-timeout-s",
    "2",
    "--kv-load-timeout-s",
    "2",
    "--kv-heartbeat-s",
    "0.2",
    "--kv-lease-s",
    "4",
    "--drain-s",
    "5",
]
ROUTER_WAITS = ["--silence-timeout-s", "3", "--health-interval-s", "0.2", "--health-timeout-s", "1", "--backoff-s", "0.2"]
ROUTER_WAITS += ["--prefill-timeout-s", "20", "--max-backoff-s", "0.5"]


@dataclass(frozen=True)
class Holding:
    """What an engine's core holds, as the kernel sees it."""

    descriptors: int
    memfd_maps: int  # mapped bytes of memory files, ours and others'
    memfds: int
    threads: int


class Town:
    """P, D and the router, by name. ``victims`` are these and the cores of P and D."""

    victims = ("P", "P core", "D", "D core", "router")

    def __init__(self, folder: Path, model: Path, connector: str) -> None:
        self.fleet = Fleet(folder)
        self.http = self.fleet.http
        self._arguments: dict[str, Sequence[str]] = {}
        self._ports = {name: free_port() for name in ("P", "D", "router")}
        self._services: dict[str, Service] = {}
        for name, role in (("P", "producer"), ("D", "consumer")):
            transfer = ["--kv-connector", connector, "--kv-role", role]
            self._arguments[name] = ["serve", str(model), *ENGINE, *WAITS, *transfer]
        self._arguments["router"] = ["router", "--prefill", self.url("P"), "--decode", self.url("D"), *ROUTER_WAITS]

    def __enter__(self) -> Town:
        try:
            for name in ("P", "D", "router"):
                self.start(name)
            for name in ("P", "D", "router"):
                self.wait_ready(name)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for service in self._services.values():  # one that is stopped would not hear SIGTERM
            if service.is_alive():
                for pid in (service.process.pid, *(c.pid for c in psutil.Process(service.process.pid).children())):
                    os.kill(pid, signal.SIGCONT)
        self.fleet.__exit__(kind, error, trace)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def log(self, name: str) -> str:
        return self._services[name].tail(30)

    # ---- processes -----------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self._services[name] = self.fleet.start(name, self._arguments[name], self._ports[name])

    def wait_ready(self, name: str) -> None:
        self.fleet.wait_ready(self._services[name], START_S, lambda text: None)

    def is_alive(self, name: str) -> bool:
        return self._services[name].is_alive()

    def pid(self, victim: str) -> int:
        """Of a service, or of its core."""
        name, _, core = victim.partition(" ")
        pid = self._services[name].process.pid
        if not core:
            return pid
        (child,) = (c for c in psutil.Process(pid).children() if "torpor.engine.process" in c.cmdline())
        return child.pid

    def wait_dead(self, name: str) -> None:
        """The service; its children with it."""
        self._services[name].process.wait(END_S)

    def engines(self) -> list[str]:
        return ["P", "D"]

    # ---- what engines say ----------------------------------------------------------------------------------------------------

    def probe(self, name: str, path: str, within_s: float) -> httpx.Response:
        """It must answer in time, whatever it says."""
        started = time.monotonic()
        response = self.http.get(f"{self.url(name)}/{path}", timeout=within_s)
        assert time.monotonic() - started < within_s
        return response

    def admin(self, name: str, path: str, timeout_s: float = 30.0, **query: Any) -> httpx.Response:
        return self.http.post(f"{self.url(name)}/{path}", params=query, timeout=timeout_s)

    def stats(self, name: str) -> dict[str, Any]:
        return dict(self.probe(name, "memory", 10).json())

    def holding(self, name: str) -> Holding:
        pid = self.pid(f"{name} core")
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        spans = [line.split()[0].split("-") for line in maps if "/memfd:" in line]
        process = psutil.Process(pid)
        return Holding(
            descriptors=process.num_fds(),
            memfd_maps=sum(int(high, 16) - int(low, 16) for low, high in spans),
            memfds=len(list(open_memfds(pid))),
            threads=process.num_threads(),
        )


def wait_for(holds: Callable[[], bool], what: str, timeout_s: float = END_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
