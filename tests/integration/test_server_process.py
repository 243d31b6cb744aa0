"""``torpor serve`` as a person starts it: the real model, a signal, a dead core, a port in use, clients that leave (E2, E10)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
MODEL = "builtin:smollm2-135m"
NAME = "smollm2-135m"
SMALL = ["--dtype", "float32", "--threads", "1", "--kv-cache-bytes", "64MiB", "--enable-sleep-mode"]


class Serve:
    """A ``torpor serve`` process and its log."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "torpor", "serve", MODEL, *SMALL, "--port", "0", *arguments]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_url(self, timeout_s: float = 120.0) -> str:
        wait_for(lambda: " at http://" in self.text or self.process.poll() is not None, timeout_s)
        assert self.process.poll() is None, self.text
        return self.text.partition(" at http://")[2].split()[0].join(["http://", ""])

    def core_pid(self) -> int:
        (core,) = psutil.Process(self.process.pid).children()
        return core.pid

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


def wait_for(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    serve = Serve(tmp_path_factory.mktemp("serve") / "log")
    try:
        yield serve.wait_url()
    finally:
        serve.end()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=12, **more)  # type: ignore[call-overload]


def memory(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/memory", timeout=10).json())


def test_whole_streamed_and_token_by_token_are_one_text(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert "Paris" in text
    positions = whole.choices[0].logprobs.content
    assert b"".join(bytes(p.bytes) for p in positions).decode().startswith(text)
    assert all(p.top_logprobs[0].token == p.token for p in positions)  # greedy takes the most likely
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, stream=True))
    assert streamed == text
    assert whole.usage.completion_tokens == len(positions)


def test_e2_level_0_pauses_and_a_request_waits_for_the_wake(client: openai.OpenAI, url: str) -> None:
    before = ask(client).choices[0].message.content
    assert httpx.post(f"{url}/sleep", params={"level": 0}, timeout=60).json()["state"] == "paused"
    assert httpx.get(f"{url}/ready").status_code == 503
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, client)
        wait_for(lambda: memory(url)["scheduler"]["waiting"] == 1)
        httpx.post(f"{url}/wake_up", timeout=60).raise_for_status()
        assert waiting.result(60).choices[0].message.content == before


def test_e2_an_answer_is_the_same_after_sleeps_of_each_level(client: openai.OpenAI, url: str) -> None:
    before = ask(client).choices[0].message.content
    for level in (1, 2):
        report = httpx.post(f"{url}/sleep", params={"level": level}, timeout=60)
        assert report.status_code == 200, report.text
        with pytest.raises(openai.InternalServerError, match="503"):
            ask(client)
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/wake_up", timeout=60).json()["state"] == "awake"
        assert ask(client).choices[0].message.content == before


def test_a_client_that_leaves_frees_its_blocks(url: str) -> None:
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert b"200" in connection.recv(4096)
        wait_for(lambda: memory(url)["scheduler"]["running"] == 1)
        assert memory(url)["cache"]["allocated_blocks"] > 0
    wait_for(lambda: memory(url)["scheduler"]["running"] == 0)
    stats = memory(url)
    assert stats["cache"]["allocated_blocks"] == 0
    assert stats["scheduler"]["aborted"] >= 1


def test_prompts_beyond_the_context_and_beyond_the_cache_are_400(client: openai.OpenAI) -> None:
    for tokens in (9000, 8000):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=NAME, prompt=[5] * tokens, max_tokens=1)
        assert str(tokens) in refused.value.message
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=NAME, prompt=[49152], max_tokens=1)
    assert "Paris" in ask(client).choices[0].message.content


def test_a_port_in_use_is_said_at_once_with_status_2(url: str, tmp_path: Path) -> None:
    port = url.rpartition(":")[2]
    serve = Serve(tmp_path / "log", "--port", port)
    try:
        assert serve.process.wait(60) == 2
        assert f"port {port}" in serve.text
        assert "--port" in serve.text
        assert "Traceback" not in serve.text
        assert "weights" not in serve.text
    finally:
        serve.end()


def test_a_signal_ends_the_server_cleanly_and_takes_its_core_along(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "log")
    try:
        serve.wait_url()
        core = psutil.Process(serve.core_pid())
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(60) == 0
        wait_for(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)
        assert "Traceback" not in serve.text
    finally:
        serve.end()


def test_a_supervisor_that_signals_both_processes_gets_a_drain_all_the_same(tmp_path: Path) -> None:
    """systemd's ``KillMode=control-group``, its default: the core gets SIGTERM too, and must not end before the requests do."""
    serve = Serve(tmp_path / "log")
    try:
        url = serve.wait_url()
        body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            said = [next(lines)]
            for pid in (serve.core_pid(), serve.process.pid):
                os.kill(pid, signal.SIGTERM)
            said += lines
        assert (len(said), said[-1]) == (41, "data: [DONE]")
        assert serve.process.wait(60) == 0, serve.text
    finally:
        serve.end()


def test_the_death_of_the_core_ends_the_server_with_one_line(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "log")
    try:
        serve.wait_url()
        os.kill(serve.core_pid(), signal.SIGKILL)
        assert serve.process.wait(60) == 1
        assert "SIGKILL" in serve.text.splitlines()[-1]
        assert "Traceback" not in serve.text
    finally:
        serve.end()
