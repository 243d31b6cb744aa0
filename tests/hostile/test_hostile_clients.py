"""Clients of the server and of the router that are slow, many, or do not speak HTTP: everybody else is served (E10)."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import hostile_kit
import httpx
import psutil
import pytest
from hostile_clients import completion, descriptors_for, dial, ends, post, serves, status_line
from hostile_servers import AppMaker, fake_app, serving, tiny_app
from starlette.types import ASGIApp

from torpor.router import RouterConfig
from torpor.router import create_app as create_router
from torpor.testing.fake_engine import FakeEngine
from torpor.web.connections import ConnectionLimits

pytestmark = pytest.mark.timeout(1800 if hostile_kit.SCALE > 1 else 120)
LIMITS = ConnectionLimits(head_s=1.0, unread_s=1.0)


def router_app(engine_url: str) -> AppMaker:
    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[ASGIApp]:
        yield create_router(RouterConfig(prefill=(engine_url,), decode=(engine_url,)))

    return make


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with serving(fake_app(FakeEngine("x" * 200), max_body_bytes=1 << 20), LIMITS) as url:
        yield url


@pytest.fixture(scope="module", params=["server", "router"])
def url(request: pytest.FixtureRequest, engine_url: str) -> Iterator[str]:
    if request.param == "server":
        yield engine_url
        return
    with serving(router_app(engine_url), LIMITS) as url:
        yield url


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,  # TLS
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 50_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"b" * 500_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\nabc",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%ff%fe%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n",
    post("/v1/completions", completion(), "Authorization: Bearer \xff\xe9"),
    post("/v1/completions", completion(), "X-Request-Id: \xff"),
    post("/v1/completions", completion(), "Accept-Encoding: \xff", "Forwarded: for=\xff"),
    post("/v1/completions", b'{"prompt": "\xff\xfe"}'),
    post("/v1/completions", b"\xef\xbb\xbf" + completion()),
    post("/v1/completions", completion().decode().encode("utf-16")),
    post("/v1/completions", b'{"prompt": "' + b"a" * (2 << 20) + b'"}'),
    post("/sleep", b"[" * 100_000),
    post("/v1/completions", b"[" * 100_000),
    post("/wake_up?tags=" + "a," * 3000, b""),
    post("/wake_up?tags=%ff", b""),
    post("/sleep?level=1&level=2&deadline_s=nan", b""),
    b"DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT localhost:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
]


def test_what_is_no_request_is_refused_or_dropped(url: str) -> None:
    for garbage in GARBAGE:
        with dial(url) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
            line = status_line(sock)
            assert not line.startswith(b"HTTP/1.1 5"), (garbage[:200], line)
        hostile_kit.tried("requests that are none")
    serves(url)


def test_mutated_requests(url: str) -> None:
    rand = hostile_kit.rng("http")
    good = post("/v1/completions", completion()) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(hostile_kit.scaled(60)):
        with dial(url) as sock:
            sock.settimeout(2)
            with contextlib.suppress(OSError):
                sock.sendall(hostile_kit.mutated_bytes(rand, good))
                sock.shutdown(socket.SHUT_WR)
            line = status_line(sock)
            assert not line.startswith(b"HTTP/1.1 5"), line
        hostile_kit.tried("requests that are none")
    serves(url)


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    with dial(url) as sock:
        sock.sendall(
            b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 30 + post("/v1/completions", completion()) + b"\x00garbage\r\n\r\n"
        )
        data = b""
        with contextlib.suppress(OSError):
            while part := sock.recv(1 << 16):
                data += part
    assert data.count(b"HTTP/1.1 200") == 31
    serves(url)


def test_a_request_that_does_not_come_to_its_end_is_given_up(url: str) -> None:
    """Headers a byte at a time, before and after a request that was answered: each connection ends in ``head_s``."""
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(dial(url)) for _ in range(hostile_kit.scaled(50))]
        for sock in slow[::2]:
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        for byte in b"GET /version HTTP/1.1\r\nX: 12":
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.sendall(bytes([byte]))
            time.sleep(0.02)
        serves(url)
        assert all(ends(sock, 10) for sock in slow)
        hostile_kit.tried("slow connections", len(slow))
    assert time.monotonic() - begun < 30


def test_a_client_that_never_reads_is_let_go_and_its_request_ends() -> None:
    body = completion(stream=True, max_tokens=10**6, n=2, logprobs=20)
    with serving(fake_app(FakeEngine("x" * 10**6)), LIMITS) as url, contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(dial(url, receive_buffer=4096)) for _ in range(hostile_kit.scaled(5))]
        for sock in deaf:
            sock.sendall(post("/v1/completions", body) * 3)  # and the next ones sent ahead
        serves(url)
        assert all(ends_unread(sock, 60) for sock in deaf)
        wait_for(lambda: stats(url)["scheduler"]["running"] == 0)
        hostile_kit.tried("clients that never read", len(deaf))
        serves(url)


def ends_unread(sock: socket.socket, timeout_s: float) -> bool:
    """Whether the connection is reset without a byte having been read."""
    poller = select.poll()
    poller.register(sock, 0)  # errors and hang-ups only
    return bool(poller.poll(timeout_s * 1000))


def stats(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/memory", timeout=20).json())


def wait_for(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def test_a_body_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.web.middleware.BodyLimit.__init__.__defaults__", (0.5,), raising=False)
    with serving(fake_app(FakeEngine("abc")), LIMITS) as url, dial(url) as sock:
        sock.sendall(post("/v1/completions", completion())[:-1])
        assert b"408" in status_line(sock)
        assert ends(sock, 10)
        serves(url)


def test_ten_thousand_connections() -> None:
    """Opened in batches, most of them idle. The server's limit is lower: the oldest that say nothing give way, whoever asks is
    answered."""
    wanted = min(10_000, hostile_kit.scaled(2_000) if hostile_kit.SCALE <= 1 else 10_000)
    limits = ConnectionLimits(head_s=60.0, connections=wanted * 3 // 4)
    with (
        descriptors_for(wanted) as count,
        serving(fake_app(FakeEngine("abc")), limits) as url,
        contextlib.ExitStack() as stack,
    ):
        slowest, opened = 0.0, []
        for batch in range(0, count, 500):
            opened += [stack.enter_context(dial(url)) for _ in range(min(500, count - batch))]
            begun = time.monotonic()
            serves(url)
            slowest = max(slowest, time.monotonic() - begun)
        mine = psutil.Process().num_fds()
        assert mine < count + limits.connections + 300, "connections over the limit were kept"
        assert ends(opened[0], 5), "the oldest did not give way"
        hostile_kit.tried("connections at one server at once", count)
        hostile_kit.tried("  slowest answer meanwhile, ms", round(1000 * slowest))
    assert slowest < 10


@pytest.fixture(scope="module")
def tiny_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tiny_app(tmp_path_factory.mktemp("model"), num_blocks=256), LIMITS) as url:
        yield url


def test_blocks_of_clients_that_never_read_are_freed(tiny_url: str) -> None:
    reference = answer(tiny_url)
    body = completion(stream=True, max_tokens=200, ignore_eos=True, n=2, logprobs=20)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(dial(tiny_url, receive_buffer=4096)).sendall(post("/v1/completions", body))
        assert answer(tiny_url) == reference
        wait_for(lambda: stats(tiny_url)["cache"]["allocated_blocks"] == 0, 60)
        hostile_kit.tried("clients that never read", 8)
    assert answer(tiny_url) == reference


def answer(url: str) -> Any:
    body = {"prompt": "a question", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = httpx.post(
        f"{url}/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}, timeout=60
    )
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["token_ids"]
