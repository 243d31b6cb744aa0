"""The commands that talk to a server: what they print, and what they say when something is wrong."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rich.console import Console
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp
from test_cli_options import run
from web_fakes import server_app

from torpor.cli.bench import percentiles
from torpor.cli.console import Progress, options, out, report, size
from torpor.cli.load import LoadConfig, run_load
from torpor.cli.pools import pools_view, report_view
from torpor.demo.fleet import Fleet
from torpor.errors import (
    BugError,
    ConfigurationError,
    DeviceMemoryError,
    EngineDeadError,
    SleepAborted,
    StateError,
    UnknownTagError,
)
from torpor.router.app import create_app as router_app
from torpor.router.config import RouterConfig
from torpor.testing.fake_engine import FakeEngine
from torpor.web.serve import HttpServer, bind, serve_until, url_of

TOKEN = "a-long-admin-token"


class LiveServer:
    """A server on a thread of its own, since the commands are no coroutines."""

    def __init__(self, engine: FakeEngine, app: ASGIApp | None = None, **config: Any) -> None:
        self.engine = engine
        self.sock = bind("127.0.0.1", 0)
        self.url = url_of(self.sock)
        self.started = threading.Event()
        self.server = HttpServer(app or server_app(engine, **config), 1.0, on_started=self.started.set)
        self.thread = threading.Thread(target=lambda: asyncio.run(serve_until(self.server, self.sock)))

    def __enter__(self) -> LiveServer:
        self.thread.start()
        assert self.started.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.stop()
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer(FakeEngine("abc")) as live:
        yield live


def test_memory_once_and_as_json(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["memory", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    for word in ("weights", "kv_cache", "runtime", "resident", "1.0 MiB", "sleeps 0"):
        assert word in shown
    assert run(["memory", server.url.removeprefix("http://"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["driver"] == "fake"


def test_sleep_and_wake_from_a_shell(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sleep", server.url, "--level", "2", "--mode", "keep", "--deadline-s", "5"]) == 0
    asked = server.engine.sleep_requests[-1]
    assert (asked.level, asked.mode, asked.deadline_s) == (2, "keep", 5)
    assert "asleep after" in capsys.readouterr().out
    assert run(["wake", server.url, "--tag", "weights", "--tag", "runtime"]) == 0
    assert httpx.get(f"{server.url}/ready").status_code == 503
    assert run(["wake", server.url, "--json"]) == 0
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert run(["sleep", server.url, "--policy", "kv_cache=discard"]) == 0
    assert server.engine.sleep_requests[-1].policies == {"kv_cache": "discard"}
    assert run(["wake", server.url]) == 0
    assert run(["pause", server.url, "--mode", "abort"]) == 0
    assert run(["resume", server.url]) == 0


def test_holders_are_named(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.holders = [{"who": "peer d1 (pid 4711)", "bytes": 1 << 20}]
    assert run(["sleep", server.url]) == 0
    assert "peer d1 (pid 4711) still holds 1.0 MiB" in capsys.readouterr().out


def test_errors_are_one_line_and_say_what_the_server_said(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.fail_next["sleep"] = SleepAborted("deadline of 1 s passed", waiting_for="peer d1")
    assert run(["sleep", server.url]) == 1
    assert capsys.readouterr().err.strip().splitlines() == ["error: /sleep: HTTP 409: deadline of 1 s passed"]
    server.engine.die()
    assert run(["sleep", server.url]) == 1
    assert "gone" in capsys.readouterr().err


def test_the_admin_token_comes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    with LiveServer(FakeEngine(), admin_token=TOKEN) as live:
        assert run(["sleep", live.url]) == 1
        shown = capsys.readouterr().err
        assert "admin token" in shown
        assert "--admin-token-file" in shown
        assert run(["sleep", live.url, "--admin-token-file", str(path)]) == 0
        assert TOKEN not in "".join(capsys.readouterr())
        path.write_text("some-other-token")
        assert run(["sleep", live.url, "--admin-token-file", str(path)]) == 1
        assert "the server was started with another --admin-token-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said", "option"),
    [
        (["sleep", "--deadline-s", "-1"], "greater than 0", "--deadline-s"),
        (["sleep", "--policy", "weights=foo"], "'keep', 'host' or 'discard'", "--policy"),
        (["wake", "--tag", "cache"], "unknown tag 'cache'", "--tag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_value_that_the_server_does_not_take_is_a_wrong_option(
    argv: list[str], said: str, option: str, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([argv[0], server.url, *argv[1:]]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.strip().endswith(f"({option})")


def test_a_tag_that_a_sleep_does_not_know_is_one_of_its_policies(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.fail_next["sleep"] = UnknownTagError("unknown tag 'bogus'", tag="bogus", known="weights")
    assert run(["sleep", server.url, "--policy", "bogus=keep"]) == 2
    assert "(--policy)" in capsys.readouterr().err
    assert run(["sleep", server.url, "--policy", "weights"]) == 2
    assert "is not TAG=POLICY" in capsys.readouterr().err


def test_a_router_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    app = router_app(RouterConfig(decode=("http://127.0.0.1:9",)))
    with LiveServer(FakeEngine(), app) as live:
        assert run(["sleep", live.url]) == 1
    assert capsys.readouterr().err.strip() == f"error: {live.url}: this is a router; ask an engine (http://127.0.0.1:9)"


def test_messages_name_commands_and_routes_instead_of_calls(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.fail_next["resume"] = StateError(
        "resume() ends a pause, but the engine is asleep: call wake_up()", state="asleep"
    )
    assert run(["resume", server.url]) == 1
    said = f"`torpor resume {server.url}` ends a pause, but the engine is asleep: call `torpor wake {server.url}`"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "what", "undo"), [("sleep", "sleep", "wake"), ("pause", "pause", "resume"), ("wake", None, None)]
)
def test_an_interrupt_says_that_the_server_goes_on(
    command: str, what: str | None, undo: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(httpx.Client, "request", interrupted)
    assert run([command, "http://engine:1"]) == 130
    said = f"the server goes on with the {what}; `torpor {undo} http://engine:1` cancels it"
    assert (said in capsys.readouterr().err) == (what is not None)


@pytest.mark.parametrize(("command", "undo"), [("sleep", "wake"), ("pause", "resume"), ("wake", None)])
def test_a_wait_that_is_over_says_that_the_server_goes_on(
    command: str, undo: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = url_of(silent)
        assert run([command, url, "--timeout-s", "0.2"]) == 1
    shown = capsys.readouterr().err
    assert f"{url} did not answer within 0.2 s (--timeout-s)" in shown
    assert undo is None or f"the server goes on with the {command}; `torpor {undo} {url}` cancels it" in shown


def test_weights_that_were_read_again_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    tags = [{"tag": t, "mapped_bytes": 1 << 20, "restored_bytes": n} for t, n in (("weights", 0), ("runtime", 1 << 10))]
    out.print(report_view({"state": "awake", "seconds": 0.1, "refilled_tags": ["weights"], "tags": tags}))
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row[1:-1]] for row in rows] == [
        ["weights", "1.0 MiB", "read again"],
        ["runtime", "1.0 MiB", "1.0 KiB"],
    ]


@pytest.mark.parametrize("command", ["memory", "sleep", "wake", "pause", "resume", "bench"])
def test_nobody_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    sock = bind("127.0.0.1", 0)
    url = url_of(sock)
    sock.close()
    assert run([command, url]) == 1
    shown = capsys.readouterr().err
    assert f"cannot reach {url}" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("url", ["http://[::1", "nonsense://x", "http://h:port", "ftp://x", "http://", ""])
@pytest.mark.parametrize("command", ["memory", "bench"])
def test_urls_that_are_none(command: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, url]) == 2
    assert f"error: URL {url!r} is n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["memory", "sleep", "bench"])
def test_an_address_that_is_nearly_right_is_told_how(
    command: str, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, server.url.replace("http:", "https:")]) == 1
    assert "the server does not speak TLS: write http://" in capsys.readouterr().err
    assert run([command, f"{server.url}/v1/"]) == 2
    assert "leave out /v1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["memory", "sleep", "bench"])
def test_another_program_s_web_page_is_not_shown(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    app = FastAPI()
    app.add_exception_handler(404, lambda request, error: HTMLResponse("<p>Not here</p>", 404))
    with LiveServer(FakeEngine(), app) as live:
        assert run([command, live.url]) == 1
    shown = capsys.readouterr().err
    assert "another program listens there" in shown
    assert "<p>" not in shown


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("command", ["sleep", "wake", "pause", "resume", "bench"])
def test_timeouts_that_are_none(command: str, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "http://127.0.0.1:1", "--timeout-s", seconds]) == 2
    assert "--timeout-s" in capsys.readouterr().err


def test_a_bench_of_a_server_that_is_silent_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert run(["bench", url_of(silent), "--timeout-s", "0.2"]) == 1
    assert "ReadTimeout" in capsys.readouterr().err


def test_a_bench_without_a_success_says_why_and_shows_no_table(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sleep", server.url, "--json"]) == 0
    capsys.readouterr()
    assert run(["bench", server.url, "--requests", "2", "--input-words", "2"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip().endswith("no request succeeded; the first error: HTTP 503: the engine is asleep")
    assert run(["bench", "http://127.0.0.1:1", "--requests", "1", "--model", "m"]) == 1
    assert "the first error: cannot reach http://127.0.0.1:1" in capsys.readouterr().err


def test_bench_measures(server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("one\n\ntwo\n")
    argv = ["bench", server.url, "--requests", "5", "--concurrency", "2", "--max-tokens", "3", "--prompts", str(prompts)]
    assert run([*argv, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests_done"], figures["requests_failed"], figures["generated_tokens"]) == (5, 0, 15)
    assert figures["prompt_tokens"] == 15
    first = figures["time_to_first_token_s"]
    assert 0 < first["p50"] <= first["p90"] <= first["max"]
    assert run([*argv, "--ignore-eos"]) == 0
    assert "time to first token" in capsys.readouterr().out
    assert [bytes(r.prompt_token_ids) for r in server.engine.requests[:5]].count(b"two") == 2


def test_bench_draws_prompts_that_share_no_prefix(server: LiveServer) -> None:
    assert run(["bench", server.url, "--requests", "4", "--input-words", "3", "--json"]) == 0
    assert len({bytes(r.prompt_token_ids)[:4] for r in server.engine.requests}) == 4


def test_bench_counts_what_fails(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.fail_at_step = (1, BugError("broke"))
    assert run(["bench", server.url, "--requests", "2", "--concurrency", "1", "--input-words", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests_done"], figures["requests_failed"]) == (1, 1)
    assert "broke" in figures["errors"][0]
    assert run(["bench", server.url, "--requests", "2", "--prompts", "/no/such/file"]) == 2


@pytest.mark.parametrize("line", ['{"choices": [{"te', "[]", "7", '{"error": "overloaded"}', '{"usage": 3}'])
async def test_an_event_that_broke_off_costs_a_bench_one_request(line: str) -> None:
    """A proxy that goes away, in the middle of a run of hours."""
    good = 'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
    answers = iter([f"data: {line}\n\n", good])
    config = LoadConfig(
        url="http://engine",
        requests=2,
        concurrency=1,
        prompts=("hi",),
        input_words=1,
        max_tokens=1,
        ignore_eos=False,
        model="m",
        seed=0,
        timeout_s=5.0,
        api_key=None,
    )
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=next(answers)))
    async with httpx.AsyncClient(transport=transport) as client:
        broken, whole = await run_load(client, config, lambda: None)
    assert broken.error
    assert (whole.error, whole.tokens) == (None, 1)


def test_the_key_of_a_bench_comes_from_a_file(server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    for content in (None, b"", b"\xff\xfe", "schl\u00fcssel".encode()):
        if content is not None:
            key.write_bytes(content)
        assert run(["bench", server.url, "--api-key-file", str(key)]) == 2
        assert f"--api-key-file {key}" in capsys.readouterr().err
    key.write_text("EMPTY\nand what somebody noted below\n")
    assert run(["bench", server.url, "--requests", "1", "--input-words", "2", "--api-key-file", str(key)]) == 0


@pytest.mark.parametrize("argv", [["memory", "--once"], ["bench", "--requests", "1", "--input-words", "2"]], ids=lambda a: a[0])
def test_a_proxy_of_the_environment_does_not_stand_before_this_machine(
    argv: list[str], server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run([argv[0], server.url, *argv[1:]]) == 0
    with Fleet(Path()) as fleet:
        assert fleet.http.get(f"{server.url}/health").status_code == 200


def test_percentiles_are_measured_values() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    hundred = percentiles([float(v) for v in range(1, 101)])
    assert hundred is not None
    assert (hundred["p50"], hundred["p90"], hundred["p99"]) == (50.0, 90.0, 99.0)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigurationError("a [bold] setting\nis wrong"), 2, "error: a [bold] setting is wrong"),
        (DeviceMemoryError("short"), 1, "error: short"),
        (EngineDeadError("gone"), 1, "error: gone"),
        (ZeroDivisionError("x"), 1, "internal error: ZeroDivisionError: x (torpor --debug shows where)"),
    ],
)
def test_one_line_per_error(error: Exception, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error) == code
    assert capsys.readouterr().err.strip() == text


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["--debug", "wake", "http://127.0.0.1:1"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setattr(options, "debug", False)


def test_progress_without_a_terminal_is_a_line_per_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("starting") as progress:
        progress("reading", 0.0)
        progress("reading", 0.5)
        progress("loading", 0.25)
        progress("loading", 1.0)
    assert capsys.readouterr().err.splitlines() == ["reading", "loading 25%"]


def test_the_table_of_pools_is_whole_in_eighty_columns() -> None:
    gib = {"resident_bytes": 538_000_000, "allocated_bytes": 537_900_000, "reserved_bytes": 999_900_000, "image_bytes": 406_000}
    tags = [{"tag": "cuda_graph", "residency": "resident", "content": "on_host", **gib}]
    memory = {"tags": tags, "host_committed_bytes": 1, "mapped_bytes": 1, "sleeps": 1, "wakes": 1}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(pools_view({"state": "awake", "memory": memory}))
    shown = console.export_text()
    assert all(size(value) in shown for value in gib.values())
    assert all(name in shown for name in ("cuda_graph", "resident", "on_host", "allocated", "reserved"))


@pytest.mark.parametrize(("stopped_by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 0)])
def test_a_server_that_was_stopped_before_it_served_ends_like_any_program(
    stopped_by: signal.Signals | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.server.run_server", lambda *args: stopped_by)
    monkeypatch.setattr("torpor.cli.serve.configure_logging", lambda level: None)
    assert run(["serve", "builtin:smollm2-135m"]) == status
