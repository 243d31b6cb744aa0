"""Mooncake over RDMA between two processes: the fault of a registration that does not follow, and torpor's absence of it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from kernel_memory import MIB, memory_regions, used_bytes
from rdma_child import Child
from rdma_engines import CACHE_BYTES, RXE_HOST, SLOW, start_with

from torpor.connectors import ConnectorConfig

pytestmark = pytest.mark.timeout(300)

A = list(range(1000, 1040))  # 40 tokens: 3 blocks
B = list(range(2000, 2040))
UNFOLLOWED = "torpor.testing.unfollowed:UnfollowedMooncake"
NOISE = 24 * MIB


@pytest.fixture(autouse=True)
def _installed() -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake's transfer engine is not installed: pip install 'torpor[mooncake]'")


@pytest.fixture
def start(children: list[Child], rdma_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts an engine. Mooncake asks for the address of the device's network, which is no loopback: so for a secret."""
    monkeypatch.setenv("MC_GID_INDEX", "1")  # Soft-RoCE has its IPv4 address there
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test and no other, long enough")
    secret.chmod(0o600)
    host = RXE_HOST if "TORPOR_RDMA_VM" in os.environ else os.environ.get("TORPOR_RDMA_HOST", "127.0.0.1")

    def make(engine_id: str, role: Any, connector: str = "mooncake") -> Child:
        config = ConnectorConfig(
            connector=connector,
            engine_id=engine_id,
            role=role,
            host=host,
            secret_file=str(secret),
            withdraw_timeout_s=30.0,
            lease_heartbeat_s=2.0,
            extra={"protocol": "rdma", "device_name": rdma_device} | SLOW,
        )
        return start_with(children, config)

    return make


def test_unfollowed_peers_read_old_bytes_with_success_and_the_memory_is_held(start: Any) -> None:
    p, d = start("P", "producer", UNFOLLOWED), start("D", "consumer")
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


def test_p1_p2_p4a_followed_everything_comes_back_and_peers_read_new_bytes(start: Any) -> None:
    p, d = start("P", "producer"), start("D", "consumer")
    p.call("fill")
    late = p.call("prefill", "r0", A, [1, 2, 3])
    assert d.call("load", "q1", A, p.call("prefill", "r1", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    assert d.call("has", A, [4, 5, 6])
    awake, held = p.call("pinned"), used_bytes()
    assert sum(memory_regions(p.pid, CACHE_BYTES)) >= CACHE_BYTES
    for cycle in range(2):
        assert p.call("sleep_report")["held"] == 0
        assert p.call("pinned") <= awake - CACHE_BYTES, "nothing of the KV cache is pinned"
        assert memory_regions(p.pid, CACHE_BYTES) == []
        assert used_bytes() < held - CACHE_BYTES + NOISE, "the bytes are back"
        p.call("wake_report")
        fresh = p.call("prefill", f"s{cycle}", B, [1, 2, 3])
        assert d.call("load", f"old{cycle}", A, late, [7, 8, 9]) == "failed", "of an epoch that is over"
        assert d.call("load", f"new{cycle}", B, fresh, [10, 11, 12]) == "recving"
        assert d.call("has", B, [10, 11, 12])
        p.call("fill")
