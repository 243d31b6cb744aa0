"""What works and should not stay as it is: doors that are open to other machines, secrets that every user may read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installed_connectors import engine as connector_engine

from torpor import router as router_module
from torpor import server as server_module
from torpor.cli.app import main
from torpor.cli.open_doors import open_doors_of_connector
from torpor.connectors import auth
from torpor.connectors.auth import exposure
from torpor.connectors.config import ConnectorConfig
from torpor.testing.fake_engine import FakeEngine

SECRET = "a-secret-of-thirty-two-characters"


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return ended.value.code if isinstance(ended.value.code, int) else 0


def secret(folder: Path, mode: int) -> str:
    path = folder / f"secret-{mode:o}"
    path.write_text(SECRET + "\n")
    path.chmod(mode)
    return str(path)


# ---- open doors --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``torpor serve`` or ``torpor router`` up to the moment when requests are taken."""
    (tmp_path / "config.json").touch()

    def start(command: str, url: str, *argv: str) -> None:
        monkeypatch.setattr(server_module, "run_server", lambda config, start, on_started: on_started(FakeFrontend(), url))
        monkeypatch.setattr(router_module, "run_router", lambda config, on_started: on_started(url))
        subject = str(tmp_path) if command == "serve" else "--decode=http://127.0.0.1:1"
        assert run(command, subject, *argv) == 0

    return start


class FakeFrontend:
    info = FakeEngine("abc").info


def warnings_of(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith("warning:")]


@pytest.mark.parametrize("url", ["http://0.0.0.0:8000", "http://[::]:8000", "http://10.1.2.3:8000"])
def test_a_server_that_others_reach_says_what_is_open(
    url: str, started: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started("serve", url)
    (line,) = warnings_of(capsys.readouterr().err)
    for said in (url, "/v1 is open", "set --api-key-file", "/sleep", "answer this machine only", "--admin-token-file"):
        assert said in line
    token = secret(tmp_path, 0o600)
    started("serve", url, "--admin-token-file", token)
    (line,) = warnings_of(capsys.readouterr().err)
    assert "set --api-key-file" in line
    assert "need the admin token" in line
    started("serve", url, "--api-key-file", token)
    assert not warnings_of(capsys.readouterr().err), "admin routes without a token answer this machine only"


def test_a_router_that_others_reach_says_whose_key_it_asks_for(
    started: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    started("router", "http://0.0.0.0:8080")
    (line,) = warnings_of(capsys.readouterr().err)
    assert "http://0.0.0.0:8080" in line
    assert "--api-key-file" in line


def test_only_a_transport_that_asks_for_no_secret_is_warned_of() -> None:
    for name, host, said in (("mooncake", "10.0.0.1", True), ("mooncake", "127.0.0.1", False), ("nixl", "10.0.0.1", False)):
        line = open_doors_of_connector(ConnectorConfig(connector=name, host=host))
        assert (line is not None) == said
        assert line is None or "--kv-host 10.0.0.1" in line
    assert open_doors_of_connector(None) is None


@pytest.mark.parametrize("command", ["serve", "router"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:80", "http://127.0.0.9:80", "http://[::1]:80", "http://[::ffff:127.0.0.1]:80"])
def test_this_machine_alone_needs_no_key(
    command: str, url: str, started: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    started(command, url)
    assert not warnings_of(capsys.readouterr().err)


# ---- secrets -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "exposed"), [(0o600, False), (0o400, False), (0o640, False), (0o644, True), (0o444, True), (0o602, True)]
)
def test_a_secret_that_everybody_can_get_at(mode: int, exposed: bool, tmp_path: Path) -> None:
    path = secret(tmp_path, mode)
    said = exposure(path)
    assert (said is not None) == exposed
    assert said is None or (path in said and f"(mode {mode:o})" in said and f"chmod 600 {path}" in said)


def test_what_is_no_file_of_ours_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets that a container was given, a pipe of the shell's, a file that is not there."""
    path = secret(tmp_path, 0o644)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.setattr(auth, "MOUNTED_SECRETS", tmp_path)
    assert exposure(path) is None
    assert exposure(str(tmp_path / "link")) is None
    monkeypatch.undo()
    read, write = os.pipe()
    assert exposure(f"/dev/fd/{read}") is None
    os.close(read), os.close(write)
    assert exposure(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "/no/such/model", "--admin-token-file", "SECRET"],
        ["serve", "/no/such/model", "--api-key-file", "SECRET"],
        ["memory", "http://127.0.0.1:1", "--admin-token-file", "SECRET"],
        ["sleep", "http://127.0.0.1:1", "--admin-token-file", "SECRET"],
        ["bench", "http://127.0.0.1:1", "--api-key-file", "SECRET"],
    ],
    ids=" ".join,
)
def test_every_command_that_reads_such_a_file_says_so_once(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = secret(tmp_path, 0o644)
    assert run(*(path if word == "SECRET" else word for word in argv)) != 0
    (line,) = warnings_of(capsys.readouterr().err)
    assert path in line
    assert SECRET not in line


def test_a_connector_s_secret_is_looked_at_where_it_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = secret(tmp_path, 0o644)
    sockets = tmp_path / "sockets"
    for _ in range(2):
        made: Any = connector_engine("ipc", str(sockets), secret_file=path)
        made.close()
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and path in r.getMessage()] == [exposure(path)]
