"""tests/deaths itself: what its threads find wrong ends the run. No engine is needed for that."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

DEATHS = Path(__file__).parents[1] / "deaths"
PROMPTS, ANSWERS = [[1]] * 8, ["right"] * 8


@pytest.fixture(autouse=True)
def harness_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEATHS))


class AnswersNull(BaseHTTPRequestHandler):
    """HTTP 200 and JSON, and nothing that an answer has."""

    asked = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "4")
        self.end_headers()
        self.wfile.write(b"null")
        self.asked.set()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def null_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), AnswersNull) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_answer_of_another_shape_is_a_fault(null_server: str) -> None:
    from asking import Asker

    asker = Asker(null_server, PROMPTS, ANSWERS, False, 3)
    asker.start()
    assert AnswersNull.asked.wait(20)
    asker.stop()
    assert asker.faults


class TownWithABug:
    """Its engines answer a sleep with an internal error; the router is there to be killed."""

    def __init__(self) -> None:
        self._router = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def url(self, name: str) -> str:
        return "http://127.0.0.1:9"

    def pid(self, victim: str) -> int:
        return self._router.pid

    def wait_dead(self, name: str) -> None:
        self._router.wait(20)

    def admin(self, name: str, path: str, timeout_s: float = 30.0, **query: object) -> httpx.Response:
        error = {"message": "oh", "type": "server_error", "code": "internal_error", "param": None}
        return httpx.Response(500, json={"error": error})


def test_an_internal_error_of_a_move_ends_the_run() -> None:
    from rounds import Death, Rounds

    rounds = Rounds(TownWithABug(), random.Random(3), print)  # type: ignore[arg-type]
    rounds._answers = ANSWERS
    with pytest.raises(AssertionError, match="internal_error"):
        rounds.run(Death("router", "kill", "sleep P", 0.0, 0.0))
