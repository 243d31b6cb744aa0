"""NIXL over UCX's rc_verbs between two processes: the fault of a registration that does not follow, and torpor's absence of
it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
from typing import Any

import numpy as np
import pytest
from kernel_memory import MIB, memory_regions, used_bytes
from rdma_child import Child, ChildError
from rdma_engines import CACHE_BYTES, RdmaEngine, start

from torpor.connectors import ConnectorConfig
from torpor.memory.procfs import pinned_bytes

pytestmark = pytest.mark.timeout(300)

A = list(range(1000, 1040))  # 40 tokens: 3 blocks
B = list(range(2000, 2040))
UNFOLLOWED = "torpor.testing.unfollowed:UnfollowedNixl"
NOISE = 24 * MIB


def test_unfollowed_peers_read_old_bytes_and_lose_writes_with_success(children: list[Child]) -> None:
    p = start(children, "P", "producer", UNFOLLOWED)
    d = start(children, "D", "consumer")
    p.call("fill")
    assert d.call("load", "q1", A, p.call("prefill", "r1", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    assert d.call("has", A, [4, 5, 6])
    before = used_bytes()
    assert p.call("sleep_report")["unmapped"] >= CACHE_BYTES
    assert p.call("pinned") >= CACHE_BYTES
    assert used_bytes() > before - NOISE, "nothing came back"
    p.call("wake_report")
    p.call("fill")
    params = p.call("prefill", "r2", B, [1, 2, 3])
    assert d.call("load", "q2", B, params, [7, 8, 9]) == "recving", "the status is success"
    assert d.call("has", A, [7, 8, 9]), "and the bytes are those of before the sleep"
    assert used_bytes() > before + CACHE_BYTES - NOISE, "held twice"
    d.call("write_over_the_wire", 20, 0xC1)
    assert p.call("first_bytes", 20) == [0], "the write is lost"


def test_p1_p2_p4a_followed_everything_comes_back_and_peers_read_new_bytes(children: list[Child]) -> None:
    p = start(children, "P", "producer")
    d = start(children, "D", "consumer")
    late = p.call("prefill", "r0", A, [1, 2, 3])
    p.call("fill")
    params = p.call("prefill", "r1", A, [1, 2, 3])
    assert d.call("load", "q1", A, params, [4, 5, 6]) == "recving"
    assert d.call("has", A, [4, 5, 6])
    awake, held = p.call("pinned"), used_bytes()
    regions = memory_regions(p.pid, CACHE_BYTES)
    assert sum(regions) >= CACHE_BYTES
    for cycle in range(2):
        report = p.call("sleep_report")
        assert (report["held"], report["unmapped"]) == (0, report["unmapped"])
        assert list(report["hooks_s"]) == ["connector"]
        assert p.call("pinned") <= awake - CACHE_BYTES, "nothing of the KV cache is pinned"
        assert memory_regions(p.pid, CACHE_BYTES) == []
        assert used_bytes() < held - CACHE_BYTES + NOISE, "the bytes are back"
        assert list(p.call("wake_report")["hooks_s"]) == ["connector"]
        fresh = p.call("prefill", f"s{cycle}", B, [1, 2, 3])
        assert d.call("load", f"old{cycle}", A, late, [7, 8, 9]) == "failed", "of an epoch that is over"
        assert d.call("load", f"new{cycle}", B, fresh, [10, 11, 12]) == "recving"
        assert d.call("has", B, [10, 11, 12])
        p.call("fill")
    d.call("write_over_the_wire", 20, 0xC1)
    assert p.call("first_bytes", 20) == [0xC1], "writes arrive"
    assert sum(memory_regions(p.pid, CACHE_BYTES)) == sum(regions), "one registration, not one more each time"
    told = d.call("told").transfers
    assert told.reads > 0
    assert told.bytes > 0
    assert told.transfer_s > 0


def test_both_asleep_and_awake_again(children: list[Child]) -> None:
    p = start(children, "P", "producer")
    d = start(children, "D", "consumer")
    for cycle in range(2):
        assert d.call("load", f"q{cycle}", A, p.call("prefill", f"r{cycle}", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert d.call("has", A, [4, 5, 6])
        for sleeper in (d, p):
            assert sleeper.call("sleep_report")["held"] == 0
        for sleeper in (p, d):
            sleeper.call("wake_report")


# ---- UCX's registration cache ----------------------------------------------------------------------------------------------


class CachedEngine(RdmaEngine):
    """An engine whose agents keep UCX's default: its registration cache is on."""

    def __init__(self, config: ConnectorConfig) -> None:
        from torpor.connectors import nixl_agent
        from torpor.connectors.nixl import NixlConnector

        nixl_agent.UCX_SETTINGS = "RCACHE_ENABLE=y"
        super().__init__(config, NixlConnector)


def test_p4a_what_ucx_keeps_in_its_cache_is_seen_and_stops_the_sleep(children: list[Child]) -> None:
    """``deregister_memory`` returns, and the pages stay pinned. Nobody who believed it would notice."""
    p = start(children, "P", "producer", make=CachedEngine)
    p.call("prefill", "r", A, [1, 2, 3])
    before = p.call("pinned")
    with pytest.raises(ChildError, match=r"bytes are still pinned by this process"):
        p.call("sleep_report")
    assert p.call("pinned") >= before - NOISE
    d = start(children, "D", "consumer")
    assert d.call("load", "q", A, p.call("prefill", "s", A, [1, 2, 3]), [4, 5, 6]) == "recving", "it serves on"
    assert d.call("has", A, [4, 5, 6])


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
