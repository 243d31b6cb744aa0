"""HTTP clients that break the rules: raw sockets on loopback, and what is said over them."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from collections.abc import Iterator
from typing import Any

import httpx


def dial(url: str, receive_buffer: int | None = None) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(20)
    try:
        sock.connect((host, int(port)))
    except OSError:
        sock.close()
        raise
    return sock


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def completion(**more: Any) -> bytes:
    return json.dumps({"prompt": "hi", "max_tokens": 2} | more).encode()


def status_line(sock: socket.socket) -> bytes:
    """The first line of the answer; empty when the connection ended or broke without one."""
    data = b""
    with contextlib.suppress(OSError):
        while b"\r\n" not in data and (part := sock.recv(4096)):
            data += part
    return data.partition(b"\r\n")[0]


def ends(sock: socket.socket, timeout_s: float) -> bool:
    """Whether the server ends the connection in that time."""
    sock.settimeout(timeout_s)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def serves(url: str) -> None:
    """It answers somebody who asks as one should, and soon."""
    with httpx.Client(base_url=url, timeout=20) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "temperature": 0})
        assert answer.status_code == 200, answer.text


@contextlib.contextmanager
def descriptors_for(count: int) -> Iterator[int]:
    """Raises the soft limit as far as there is need; how many connections fit, both ends being ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 512
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        yield min(count, (max(soft, most) - 512) // 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
