"""Every transport that reads over RDMA, between two processes: the fault of a registration that does not follow, and torpor's
absence of it."""

from __future__ import annotations

import pytest
from kernel_memory import MIB, memory_regions, used_bytes
from rdma_engines import CACHE_BYTES, Engines
from rdma_transports import TRANSPORTS

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.connector),
]

A = list(range(1000, 1040))  # 40 tokens: 3 blocks
B = list(range(2000, 2040))
NOISE = 24 * MIB


def test_unfollowed_peers_read_old_bytes_and_lose_writes_with_success(engines: Engines) -> None:
    p, d = engines.start("P", "producer", connector=engines.transport.unfollowed), engines.start("D", "consumer")
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


def test_p1_p2_p4a_followed_everything_comes_back_and_peers_read_new_bytes(engines: Engines) -> None:
    p, d = engines.start("P", "producer"), engines.start("D", "consumer")
    late = p.call("prefill", "r0", A, [1, 2, 3])
    p.call("fill")
    assert d.call("load", "q1", A, p.call("prefill", "r1", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    assert d.call("has", A, [4, 5, 6])
    awake, held = p.call("pinned"), used_bytes()
    regions = memory_regions(p.pid, CACHE_BYTES)
    assert sum(regions) >= CACHE_BYTES
    for cycle in range(2):
        report = p.call("sleep_report")
        assert (report["held"], list(report["hooks_s"])) == (0, ["connector"])
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


def test_both_asleep_and_awake_again(engines: Engines) -> None:
    p, d = engines.start("P", "producer"), engines.start("D", "consumer")
    for cycle in range(2):
        assert d.call("load", f"q{cycle}", A, p.call("prefill", f"r{cycle}", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert d.call("has", A, [4, 5, 6])
        for sleeper in (d, p):
            assert sleeper.call("sleep_report")["held"] == 0
        for sleeper in (p, d):
            sleeper.call("wake_report")
