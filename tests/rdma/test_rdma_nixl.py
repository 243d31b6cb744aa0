"""What is NIXL's own: UCX's registration cache, which keeps what NIXL was told to let go; and NIXL's account of its reads."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
from typing import Any

import numpy as np
import pytest
from kernel_memory import MIB
from rdma_child import Child, ChildError
from rdma_engines import CACHE_BYTES, Engines, RdmaEngine
from rdma_transports import NIXL, RdmaTransport

from torpor.connectors import ConnectorConfig
from torpor.memory.procfs import pinned_bytes

pytestmark = pytest.mark.timeout(300)

A = list(range(1000, 1040))  # 40 tokens: 3 blocks
NOISE = 24 * MIB


class CachedEngine(RdmaEngine):
    """An engine whose agents keep UCX's default: its registration cache is on."""

    def __init__(self, config: ConnectorConfig, transport: RdmaTransport) -> None:
        from torpor.connectors import nixl_settings

        nixl_settings.UCX_SETTINGS = "RCACHE_ENABLE=y"
        super().__init__(config, transport)


@pytest.mark.parametrize("transport", [NIXL], ids=["nixl"])
def test_p4a_what_ucx_keeps_in_its_cache_is_seen_and_stops_the_sleep(engines: Engines) -> None:
    """``deregister_memory`` returns, and the pages stay pinned. Nobody who believed it would notice."""
    p = engines.start("P", "producer", make=CachedEngine)
    p.call("prefill", "r", A, [1, 2, 3])
    before = p.call("pinned")
    with pytest.raises(ChildError, match=r"bytes are still pinned by this process"):
        p.call("sleep_report")
    assert p.call("pinned") >= before - NOISE
    d = engines.start("D", "consumer")
    assert d.call("load", "q", A, p.call("prefill", "s", A, [1, 2, 3]), [4, 5, 6]) == "recving", "it serves on"
    assert d.call("has", A, [4, 5, 6])
    told = d.call("told").transfers
    assert (told.reads > 0, told.bytes > 0, told.transfer_s > 0) == (True, True, True)


class RawOwner:
    """NIXL itself and a memfd: no torpor between. ``settings``: UCX's, or none for its defaults."""

    def __init__(self, settings: str) -> None:
        from torpor.connectors.nixl_agent import load_package

        package = load_package()
        self.agent = package.nixl_agent("raw-owner", package.nixl_agent_config(enable_prog_thread=True, backends=[]))
        options = ",".join(filter(None, ["TLS=rc_v", settings]))
        self.agent.create_backend("UCX", {"engine_config": options})
        self.fd = os.memfd_create("torpor-test")
        os.ftruncate(self.fd, CACHE_BYTES)
        self.map = mmap.mmap(self.fd, CACHE_BYTES)
        self.address = np.frombuffer(self.map, dtype=np.uint8).ctypes.data
        self.registration: Any = None

    def fill(self, byte: int) -> None:
        ctypes.memset(self.address, byte, CACHE_BYTES)

    def register(self) -> tuple[int, bytes]:
        """The address and new metadata."""
        self.registration = self.agent.register_memory([(self.address, CACHE_BYTES, 0, "")], "DRAM")
        return self.address, bytes(self.agent.get_agent_metadata())

    def deregister(self) -> None:
        self.agent.deregister_memory(self.registration)

    def punch(self) -> None:
        """The pages go, the mapping stays: UCX watches mappings, and does not see it."""
        libc = ctypes.CDLL(None, use_errno=True)
        keep_size_and_punch = 3
        assert libc.fallocate(self.fd, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(CACHE_BYTES)) == 0

    def pinned(self) -> int:
        return pinned_bytes()

    def close(self) -> None:
        self.agent = None


class RawReader:
    def __init__(self) -> None:
        from torpor.connectors.nixl_agent import Agent

        self.agent = Agent("raw-reader", serves=False, tls="rc_v")
        self.page = mmap.mmap(-1, MIB)
        self.address = np.frombuffer(self.page, dtype=np.uint8).ctypes.data
        self.agent.register([(self.address, MIB)], "DRAM", 0)

    def read(self, address: int, metadata: bytes) -> list[int]:
        """The bytes that arrive from the start of the owner's memory, over an agent that knew nothing of it before."""
        from torpor.connectors.nixl_reads import rows

        ctypes.memset(self.address, 0, MIB)
        peer = self.agent.add_remote(metadata)
        here = self.agent.prepare(None, rows((self.address, MIB, 0, 1)), "DRAM")
        there = self.agent.prepare(peer, rows((address, MIB, 0, 1)), "DRAM")
        first = np.zeros(1, dtype=np.int32)
        assert self.agent.post_read(here, first, there, first).wait(time.monotonic() + 60)
        there.release()
        here.release()
        self.agent.remove_remote(peer)
        return sorted(set(self.page[:MIB]))

    def close(self) -> None:
        self.agent.close()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        pytest.param("", True, id="UCX's default"),
        pytest.param("RCACHE_ENABLE=n", False, id="torpor's", marks=pytest.mark.slow),
    ],
)
def test_ucx_keeps_a_deregistered_region_unless_its_cache_is_off(children: list[Child], settings: str, kept: bool) -> None:
    """The trap: memory that does not come back, and old bytes under *fresh* metadata."""
    owner, reader = Child(functools.partial(RawOwner, settings)), Child(RawReader)
    children += [owner, reader]
    owner.call("fill", 0xA1)
    own = owner.call("pinned")
    assert reader.call("read", *owner.call("register")) == [0xA1]
    owner.call("deregister")
    assert (owner.call("pinned") >= own + CACHE_BYTES) == kept, "pinned after deregister_memory"
    owner.call("punch")
    owner.call("fill", 0xB1)
    assert reader.call("read", *owner.call("register")) == ([0xA1] if kept else [0xB1])
