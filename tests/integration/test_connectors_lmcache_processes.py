"""``lmcache`` between processes: what one engine kept at a remote another finds, over sleeps; a remote that dies costs hits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_child import Child

from torpor.connectors import ConnectorConfig
from torpor.request import GenerationRequest, SamplingParams
from torpor.testing.kv_engine import KVEngine, missing_package

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]

A = list(range(100, 113))  # three blocks of four, and the token that is computed
B = list(range(200, 213))
WAIT_S = 60.0


@pytest.fixture
def remote() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """LMCache's own server, and its URL."""
    if missing := missing_package("lmcache"):
        pytest.skip(missing)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    server = subprocess.Popen([sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], env=environment)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert server.poll() is None, "the server ended"
            time.sleep(0.1)
    yield f"lm://127.0.0.1:{port}", server
    server.kill()
    server.wait(10)


def found_by(d: KVEngine, prompt: list[int]) -> int:
    request = GenerationRequest(request_id="asks", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))
    return d.scheduler.get_num_new_matched_tokens(request, 0)[0]


def read(d: KVEngine, name: str, prompt: list[int]) -> bool:
    """Whether D finds what another engine kept, and gets it byte for byte."""
    deadline = time.monotonic() + WAIT_S
    while found_by(d, prompt) < 12 and time.monotonic() < deadline:
        time.sleep(0.05)
    return d.load(name, prompt, {}, [4, 5, 6]) == "recving" and d.has(prompt, [4, 5, 6])


def test_one_engine_finds_what_another_kept_over_sleeps_of_both(
    remote: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url, server = remote
    extra: dict[str, Any] = {"host_bytes": 16 << 20, "remote_url": url}
    with (
        Child("lmcache", "P", "both", tmp_path, extra=extra) as p,
        KVEngine(ConnectorConfig(connector="lmcache", engine_id="D", extra=extra)) as d,
    ):
        p.call("prefill", "r", A, [1, 2, 3])
        assert read(d, "q", A)
        for cycle in range(2):
            for who in ("P", "D", "both"):
                if who != "D":
                    assert p.call("sleep")["held_bytes"] == 0
                if who != "P":
                    d.sleep()
                if who != "D":
                    p.call("wake")
                if who != "P":
                    d.wake()
                prompt = [cycle, len(who), ord(who[0]), *B[:10]]
                p.call("prefill", f"r{cycle}{who}", prompt, [3, 0, 5])
                assert read(d, f"q{cycle}{who}", prompt)
        p.call("sleep")
        assert read(d, "asleep", A), "what P kept is not P's memory"
        server.kill()
        server.wait(10)
        begun = time.monotonic()
        assert found_by(d, [9, *A]) == 0
        assert time.monotonic() - begun < 30
        assert d.sleep().unmapped_bytes > 0
        d.wake()
