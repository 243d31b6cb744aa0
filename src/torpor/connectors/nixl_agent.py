"""The NIXL package behind the few calls that are needed, its exceptions translated, its traps closed.

Facts this relies on, all run (``docs/design/connectors.md``):
- NIXL's Python class starts its progress thread with a delay of 0: it spins on a whole core. 1 ms costs 2 % and is no slower.
- ``import nixl`` logs to stdout and turns ``logging.raiseExceptions`` off.
- With the system's libibverbs and no RDMA device, a process with UCX's ``ib`` module dies at its exit. Where there is a device,
  the wheel's own libibverbs does not find it, unless the system's is loaded before (``torpor._native.verbs``).
- UCX keeps a registration in its cache after ``deregister_memory`` unless it is told not to (``RCACHE_ENABLE=n``).
- An agent that is destroyed with a transfer in flight can kill the *owner* of the memory, once that runs again.
- Notifications wait in the agent until somebody asks for them: a peer could fill our memory with them.
- ``remove_remote_agent`` frees what is known of the peer, descriptor lists of its memory included.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torpor._native import share_system_verbs
from torpor.connectors import nixl_settings
from torpor.errors import ConnectorError, TransportError

logger = logging.getLogger(__name__)

PACKAGES = ("nixl_cu13", "nixl")
UCX = "UCX"
PROGRESS_DELAY_US = 1000
SPIN_S = 0.0005
NAP_S = 0.0002

Rows = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]

_import_lock = threading.Lock()
_patch_lock = threading.Lock()
_taken: set[str | None] = set()  # what UCX started with in this process, so that is not what is wrong


def load_package() -> Any:
    """The ``nixl_cu13`` (or ``nixl``) module. ConnectorError when neither is installed."""
    with _import_lock:
        _choose_verbs()
        raising = logging.raiseExceptions
        reasons = []
        for name in PACKAGES:
            try:
                package = importlib.import_module(name)
            except ImportError as error:
                reasons.append(str(error))
                continue
            logging.getLogger("nixl").setLevel(logging.WARNING)
            logging.raiseExceptions = raising
            return package
    raise ConnectorError(
        f"connector 'nixl' needs the NIXL package: pip install 'torpor[nixl]' ({'; '.join(reasons)})",
        connector="nixl",
        setting="kv_connector",
    )


def _choose_verbs() -> None:
    """Before the import: UCX looks for RDMA devices when it is loaded."""
    if not _has_rdma_device():
        # The one environment variable set here: UCX takes it in no other way.
        os.environ.setdefault("UCX_MODULES", "^ib")
    elif not share_system_verbs(_private_netlink()):
        logger.warning("an RDMA device, and no libibverbs: NIXL will not use it; install libibverbs1 and its providers")


def _private_netlink() -> list[Path]:
    """The copies of libnl-route in the wheels."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES if name not in sys.modules]
    folders = [Path(spec.origin).parent.parent for spec in specs if spec is not None and spec.origin is not None]
    return [library for folder in folders for library in folder.glob("nixl*.libs/libnl-route-*.so*")]


def _has_rdma_device() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


class Agent:
    """One NIXL agent with its UCX backend. Used by one thread at a time. TransportError from every call that fails."""

    def __init__(self, name: str, *, serves: bool, tls: str | None, backend: str = UCX) -> None:
        """``serves``: peers will read from memory registered here, so a thread of NIXL's makes progress for them.
        ConfigurationError for a setting of UCX's that keeps the process's first agent from starting."""
        package = load_package()
        settings = {"engine_config": nixl_settings.engine_config(tls)} if backend == UCX else {}
        try:
            with _translated(f"start an agent with backend {backend}"), patient_progress(package):
                config = package.nixl_agent_config(enable_prog_thread=serves, capture_telemetry=not serves, backends=[])
                self._agent = package.nixl_agent(name, config)
                self._agent.create_backend(backend, settings)
        except TransportError as error:
            wrong = nixl_settings.refused(tls) if backend == UCX and tls not in _taken else None
            if wrong is None:
                raise
            raise wrong from error
        _taken.add(tls)
        self.name = name

    def register(self, ranges: Sequence[tuple[int, int]], kind: str, device: int) -> Any:
        """(address, bytes) each. The registration, for ``deregister``."""
        with _translated("register memory"):
            return self._agent.register_memory([(address, nbytes, device, "") for address, nbytes in ranges], kind)

    def deregister(self, registration: Any) -> None:
        with _translated("deregister memory"):
            self._agent.deregister_memory(registration)

    def metadata(self) -> bytes:
        with _translated("read the agent's metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_remote(self, metadata: bytes) -> str:
        with _translated("take a peer's metadata"):
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove_remote(self, peer: str) -> None:
        """Forgets a peer: its memory cannot be addressed any more, by lists made before either. Nothing may be in flight."""
        with _translated("forget a peer"):
            self._agent.remove_remote_agent(peer)

    def take_notices(self) -> list[bytes]:
        """What peers have notified since the last call."""
        with _translated("take notifications"):
            return [notice for notices in self._agent.get_new_notifs().values() for notice in notices]

    def prepare(self, peer: str | None, rows: Rows, kind: str) -> Any:
        """rows: (address, block bytes, device, stride, count) each; ``peer`` None: memory of ours."""
        with _translated("prepare descriptors"):
            return self._agent.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", rows, kind)

    def post_read(self, local: Any, local_indices: Indices, remote: Any, remote_indices: Indices, notice: bytes = b"") -> Read:
        """``notice`` reaches the peer when the read is done, not before."""
        with _translated("post a read"):
            handle = self._agent.make_prepped_xfer("READ", local, local_indices, remote, remote_indices, notice)
            return Read(self._agent, handle, self._agent.transfer(handle))

    def close(self) -> None:
        """Nothing may be in flight. Idempotent."""
        self._agent = None


@dataclass(frozen=True, slots=True)
class ReadTelemetry:
    """NIXL's own account of one read. ``descriptors`` after it merged those of neighbouring blocks."""

    descriptors: int
    nbytes: int
    post_s: float
    transfer_s: float


class Read:
    """One posted READ. It ends when NIXL says DONE or ERR and at no other time: giving up on it does not stop its bytes."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state
        self.telemetry: ReadTelemetry | None = None  # once it is done, where NIXL tells

    def poll(self) -> str:
        """ "PROC", "DONE" or "ERR"; also what moves it forward."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:
                logger.debug("a read ended with %r", error)
                self._state = "ERR"
        return self._state

    @property
    def in_flight(self) -> bool:
        return self.poll() == "PROC"

    def wait(self, deadline: float) -> bool:
        """True when it is done. False when it is still in flight at the deadline. TransportError when it failed."""
        spin_until = time.monotonic() + SPIN_S
        while self.poll() == "PROC":
            now = time.monotonic()
            if now > deadline:
                return False
            if now > spin_until:
                time.sleep(NAP_S)
        state = self._state
        with contextlib.suppress(Exception):
            if state == "DONE":
                self.telemetry = self._told()
        with contextlib.suppress(Exception):
            self._handle.release()
        if state != "DONE":
            raise TransportError("the read failed: the peer is gone, or the memory is not registered there", transport="nixl")
        return True

    def _told(self) -> ReadTelemetry:
        told = self._agent.get_xfer_telemetry(self._handle)
        return ReadTelemetry(told.descCount, told.totalBytes, told.postDuration / 1e6, told.xferDuration / 1e6)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """NIXL's exceptions are plain ``Exception`` subclasses, one per status."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(f"NIXL cannot {what}: {type(error).__name__}: {error}", transport="nixl") from error


@contextlib.contextmanager
def patient_progress(package: Any) -> Iterator[None]:
    """While an agent is made, its progress thread gets a delay. The Python class writes 0 and offers no argument for it."""
    bindings = getattr(sys.modules[package.nixl_agent.__module__], "nixlBind", None)
    plain = getattr(bindings, "nixlAgentConfig", None)
    if plain is None:
        logger.warning("this NIXL package hides its agent's configuration: its progress thread will use a core of its own")
        yield
        return

    def patient(self: Any, name: str, value: Any) -> None:
        plain.__setattr__(self, name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    with _patch_lock:
        setattr(bindings, "nixlAgentConfig", type("PatientConfig", (plain,), {"__setattr__": patient}))  # noqa: B010
        try:
            yield
        finally:
            setattr(bindings, "nixlAgentConfig", plain)  # noqa: B010
