"""Mooncake's transfer engine behind the few calls that are needed, its return codes translated, its traps closed.

Facts this relies on, all run (``docs/design/connectors.md``):
- An engine starts in milliseconds, but destroying one takes 0.9 s and keeps every other Python thread from running meanwhile. So
  none is destroyed while the process lives: what nobody uses any more is handed to the next who asks.
- A read cannot be stopped. It blocks without the interpreter's lock, and ends by itself after 30 s without progress.
- Without an RDMA device, protocol "rdma" runs TCP and says nothing.
- More than 1024 slices in one batch fail over TCP.
- It logs to stderr whatever Python's logging says; ``MC_LOG_LEVEL`` is the only switch, read when the library is loaded.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torpor.errors import ConfigurationError, ConnectorError, TransportError

PROTOCOLS = ("tcp", "rdma")
MAX_SLICES = 1024
RDMA_DEVICES = Path("/sys/class/infiniband")

_import_lock = threading.Lock()


def load_package() -> Any:
    """The module ``mooncake.engine``. ConnectorError when it is not installed, or cannot be loaded."""
    with _import_lock:
        # The one environment variable set here: the library reads it when it is loaded and takes it in no other way.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            return importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise ConnectorError(
                "connector 'mooncake' needs Mooncake's transfer engine: pip install 'torpor[mooncake]', and the system's "
                f"libibverbs1, libnuma1 and libcurl4 ({error})",
                connector="mooncake",
                setting="kv_connector",
            ) from error


def check_protocol(protocol: str, device_name: str | None) -> None:
    """ConfigurationError for a protocol that is not known, or that this machine has no device for: Mooncake itself would take TCP
    in silence."""
    if protocol not in PROTOCOLS:
        raise ConfigurationError(
            f"connector option protocol {protocol!r} is none of {', '.join(PROTOCOLS)}", setting="protocol", value=protocol
        )
    if protocol == "tcp":
        if device_name is not None:
            raise ConfigurationError(
                "connector option device_name is for protocol 'rdma'", setting="device_name", value=device_name
            )
        return
    present = sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    missing = [name for name in (device_name or "").split(",") if name and name not in present]
    if missing or not present:
        raise ConfigurationError(
            f"protocol 'rdma': this machine has no RDMA device {', '.join(missing) or 'at all'}; it has: "
            f"{', '.join(present) or 'none'}",
            setting="device_name" if missing else "protocol",
            value=device_name if missing else protocol,
        )


class Engine:
    """One transfer engine. ``register`` and ``unregister`` belong to one thread at a time, reads to another. TransportError from
    every call that fails."""

    def __init__(self, host: str, protocol: str, device_name: str | None) -> None:
        self._engine = load_package().TransferEngine()
        _check(self._engine.initialize(host, "P2PHANDSHAKE", protocol, device_name or ""), "start an engine")
        self.segment = f"{host}:{self._engine.get_rpc_port()}"  # what peers call it
        self._registered: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        _check(self._engine.register_memory(address, nbytes), f"register {nbytes} bytes")
        self._registered.append(address)

    def unregister(self, address: int) -> None:
        """What could not be unregistered stays known as registered, for the next attempt."""
        _check(self._engine.unregister_memory(address), "unregister memory")
        self._registered.remove(address)

    def unregister_all(self) -> None:
        """Goes on after a failure, and raises the first."""
        failures = []
        for address in reversed(self._registered):
            try:
                self.unregister(address)
            except TransportError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> None:
        """Blocks until every slice has arrived, or until the engine gives up."""
        for start in range(0, len(local), MAX_SLICES):
            part = slice(start, start + MAX_SLICES)
            code = self._engine.batch_transfer_sync_read(peer, list(local[part]), list(remote[part]), list(sizes[part]))
            _check(code, f"read from {peer}: the peer is gone, or the memory is not registered there")


_idle: dict[tuple[str, str, str | None], list[Engine]] = {}
_idle_lock = threading.Lock()


def borrow_engine(host: str, protocol: str, device_name: str | None) -> Engine:
    """One that nobody uses, or a new one."""
    with _idle_lock:
        waiting = _idle.get((host, protocol, device_name))
        if waiting:
            return waiting.pop()
    return Engine(host, protocol, device_name)


def return_engine(engine: Engine, host: str, protocol: str, device_name: str | None) -> None:
    """With nothing registered and nothing in flight."""
    engine.unregister_all()
    with _idle_lock:
        _idle.setdefault((host, protocol, device_name), []).append(engine)


class Flight:
    """One call on a thread of its own, because it cannot be stopped: giving up on it does not end it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(call,), name="torpor-kv-mooncake", daemon=True).start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def in_flight(self) -> bool:
        return not self._ended.is_set()

    def wait(self, deadline: float) -> bool:
        """True when it is done, False when it is still in flight at the deadline. TransportError when it failed."""
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            return False
        if self._error is not None:
            raise self._error
        return True


def _check(code: int, what: str) -> None:
    if code != 0:
        raise TransportError(f"Mooncake cannot {what} (code {code})", transport="mooncake", code=code)
