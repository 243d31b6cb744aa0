"""``lmcache`` between processes: what one engine kept at a remote, or pushed, another finds; one that dies costs hits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_child import Child
from lmcache_pairs import PAIR_ITEMS, free_peer

from torpor.connectors import ConnectorConfig
from torpor.demo.fleet import free_port
from torpor.request import GenerationRequest, SamplingParams
from torpor.testing.connectors import ITEMS, Status, Subject
from torpor.testing.connectors.stage import workers
from torpor.testing.connectors.suite import chosen, run_item
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
    port = free_port()
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


def failures(subject: Subject, names: list[str]) -> list[tuple[str, str]]:
    with workers() as processes:
        outcomes = [run_item(subject, item, processes) for item in chosen(names)]
    return [(outcome.item, outcome.reason) for outcome in outcomes if outcome.status is not Status.PASSED]


@pytest.mark.long
def test_the_conformance_suite_over_an_lm_server(remote: tuple[str, subprocess.Popen[bytes]]) -> None:
    subject = Subject.of("lmcache", extra={"host_bytes": 16 << 20, "remote_url": remote[0]})
    by_tokens = ["wrong requests", "old epoch"]  # not applicable to what is found by tokens
    assert failures(subject, [item.name for item in ITEMS if item.name not in by_tokens]) == []


@pytest.mark.long
def test_the_conformance_suite_in_the_pd_mode(pd_peer: str) -> None:
    assert failures(Subject.of("lmcache", extra={"pd_peer": pd_peer, "pd_buffer_bytes": 48 << 20}), PAIR_ITEMS) == []


@pytest.fixture
def pd_peer() -> str:
    for package in ("lmcache", "nixl"):
        if missing := missing_package(package):
            pytest.skip(missing)
    return free_peer()


def test_p2_a_decode_engine_that_is_stopped_or_killed_holds_up_no_sleep(pd_peer: str, tmp_path: Path) -> None:
    """P pushes to it meanwhile; the one that takes its place is pushed to."""
    extra: dict[str, Any] = {"pd_peer": pd_peer, "pd_buffer_bytes": 1 << 20, "pd_wait_s": 5.0}
    with KVEngine(ConnectorConfig(connector="lmcache", engine_id="P", role="producer", extra=extra)) as p:
        with Child("lmcache", "D", "consumer", tmp_path, extra=extra) as d:
            d.wait_until_up()
            assert d.call("load", "q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            assert d.call("has", A, [4, 5, 6])
            d.send_signal(signal.SIGSTOP)
            for n in range(3):
                p.prefill(f"s{n}", [n, *B], [1, 2, 3])
                begun = time.monotonic()
                assert p.sleep().held_bytes == 0
                p.wake()
                assert time.monotonic() - begun < 4.0
            d.process.kill()
            d.death()
        with Child("lmcache", "D", "consumer", tmp_path, extra=extra) as d:
            d.wait_until_up()
            deadline = time.monotonic() + WAIT_S
            name = 0
            while d.call("load", f"q{name}", [name, *A], p.prefill(f"t{name}", [name, *A], [1, 2, 3]), [4, 5, 6]) != "recving":
                assert time.monotonic() < deadline
                name += 1
            assert d.call("has", [name, *A], [4, 5, 6])
