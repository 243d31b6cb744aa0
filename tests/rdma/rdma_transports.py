"""What differs between the transports that read over RDMA: how an engine is given one, and how a peer writes through it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torpor.connectors.nixl_reads import rows

RDMA_ONLY = {"ucx_tls": "rc_v"}  # without it UCX would use shared memory within one host, and nothing would be proven
SLOW = {"connect_timeout_s": 30.0, "handshake_timeout_s": 30.0, "read_timeout_s": 60.0}  # an emulated processor
RXE_HOST = "10.99.0.1"  # of the device in the machine that scripts/rdma-vm boots


@dataclass(frozen=True)
class RdmaTransport:
    """``unfollowed``: the same, with registrations that do not follow the mapping. ``write(remote, there, byte)``: a one-sided
    WRITE of one block to that address of the engine that we read from, as a peer that pushes KV would do it."""

    connector: str
    package: str
    unfollowed: str
    write: Callable[[Any, int, int], None]
    options: Callable[[str, Path], dict[str, Any]] = field(default=lambda device, folder: {"extra": RDMA_ONLY | SLOW})

    def settings(self, device: str, folder: Path) -> dict[str, Any]:
        """Of ConnectorConfig. Skips without the package."""
        if importlib.util.find_spec(self.package) is None:
            pytest.skip(f"{self.package} is not installed: pip install 'torpor[{self.connector}]'")
        return self.options(device, folder)


def _nixl_write(remote: Any, there: int, byte: int) -> None:
    station = remote._station
    size = station.block_bytes
    station._staging[:size] = byte
    local = station.agent.prepare(None, rows((station.address, size, 0, 1)), "DRAM")
    far = station.prepare_remote(rows((there, size, 0, 1)), "DRAM")
    agent = station.agent._agent
    first = np.zeros(1, dtype=np.int32)
    handle = agent.make_prepped_xfer("WRITE", local, first, far, first, b"")
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    handle.release()
    local.release()
    assert state == "DONE", state


def _mooncake_write(remote: Any, there: int, byte: int) -> None:
    station = remote._station
    size = station.block_bytes
    station._staging[:size] = byte
    code = station.engine._engine.transfer_sync_write(remote._peer, station.address, there, size)
    assert code == 0, code


def _mooncake_options(device: str, folder: Path) -> dict[str, Any]:
    """Mooncake asks for the address of the device's network, which is no loopback: so for a secret."""
    os.environ["MC_GID_INDEX"] = "1"  # Soft-RoCE has its IPv4 address there; the library reads it when it is loaded, in a child
    secret = folder / "secret"
    secret.write_text("a secret of this test and no other, long enough")
    secret.chmod(0o600)
    host = RXE_HOST if "TORPOR_RDMA_VM" in os.environ else os.environ.get("TORPOR_RDMA_HOST", "127.0.0.1")
    return {"host": host, "secret_file": str(secret), "extra": {"protocol": "rdma", "device_name": device} | SLOW}


NIXL = RdmaTransport("nixl", "nixl_cu13", "torpor.testing.unfollowed:UnfollowedNixl", _nixl_write)
MOONCAKE = RdmaTransport(
    "mooncake", "mooncake", "torpor.testing.unfollowed:UnfollowedMooncake", _mooncake_write, _mooncake_options
)
TRANSPORTS = (NIXL, MOONCAKE)
