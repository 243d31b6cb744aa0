"""Every registered connector when something is missing or wrong: the error says what, and what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from connector_pairs import A
from installed_connectors import NAMES, Case, case, engine, needs

from torpor.connectors import wire
from torpor.connectors.channel import Channel
from torpor.errors import ConfigurationError, ConnectorError, RequestError, TorporError
from torpor.testing.connectors import Subject
from torpor.testing.connectors.engine import SuiteEngine

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
WRONG = [(name, extra, says) for name in NAMES for extra, says in case(name).wrong]


@pytest.mark.parametrize("name", [name for name in NAMES if case(name).packages])
def test_without_its_package_the_error_says_what_to_install(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in case(name).packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConnectorError, match=rf"pip install 'torpor\[{case(name).install}\]'") as caught:
        engine(name, str(tmp_path))
    assert caught.value.fields["connector"] == name
    assert re.search(rf"^{case(name).install} = \[", PYPROJECT.read_text(encoding="utf-8"), re.M), "the extra is there"


@pytest.mark.parametrize("name", [name for name in NAMES if not case(name).packages])
def test_the_others_need_nothing(name: str, tmp_path: Path) -> None:
    made = engine(name, str(tmp_path))
    assert made.epoch_text() is not None
    made.close()


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_lists_the_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'colour'.*known: ") as caught:
        engine(name, str(tmp_path), {"colour": "red"})
    assert caught.value.fields["setting"] == "colour"


@pytest.mark.parametrize(("name", "extra", "says"), WRONG, ids=[f"{name}-{extra}" for name, extra, _ in WRONG])
def test_a_wrong_option_is_named(name: str, extra: dict[str, Any], says: str, tmp_path: Path) -> None:
    needs(name, str(tmp_path))
    with pytest.raises(TorporError, match=says):
        engine(name, str(tmp_path), extra)


@pytest.mark.parametrize("name", NAMES)
def test_a_role_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="kv_role"):
        engine(name, str(tmp_path), role="bystander")


def hand_off(name: str, folder: str) -> tuple[Any, dict[str, Any]]:
    if Subject.of(name, extra=case(name).extra).kind.finds_by != "params":
        pytest.skip("it takes no kv_transfer_params")
    needs(name, folder)
    made = engine(name, folder)
    params = made.prefill("r", A, [1, 2, 3])
    for part in (params, *params.get("torpor_children", {}).values()):
        part["remote_engine_id"] = "somebody else"
    return made, params


@pytest.mark.parametrize("name", NAMES)
def test_params_of_an_older_version_are_refused_and_of_a_newer_one_read(name: str, tmp_path: Path) -> None:
    """Without what makes them safe to believe nothing is read; what a newer one says besides is passed over."""
    made, params = hand_off(name, str(tmp_path))
    try:
        made.scheduler.check_params({**params, "a field of the future": 1}, len(A))
        old = {key: value for key, value in params.items() if key not in ("torpor", "torpor_children")}
        with pytest.raises(RequestError, match="torpor"):
            made.scheduler.check_params(old, len(A))
    finally:
        made.close()


@pytest.mark.parametrize("name", [name for name in NAMES if case(name) != Case()])
def test_an_engine_of_an_older_version_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its control protocol is another one: its load fails, with what to do, and the next engine is served."""
    if Subject.of(name, extra=case(name).extra).kind.finds_by != "params":
        pytest.skip("it has no control channel")
    needs(name, str(tmp_path))
    subject = Subject.of(name, extra=case(name).extra)
    p = SuiteEngine(subject, "producer", f"P-{name}", str(tmp_path))
    d = SuiteEngine(subject, "consumer", f"D-{name}", str(tmp_path))
    try:
        plain, older = wire.PROTOCOL, wire.PROTOCOL - 1
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", _saying(older))
            assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "failed"
        assert f"control protocol {older} meets {plain}: run the same torpor version on both engines" in caplog.text
        assert d.load("again", A, p.prefill("s", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    finally:
        d.close()
        p.close()


def _saying(version: int) -> Any:
    plain = Channel.send

    def send(channel: Channel, message: Any) -> Any:
        if isinstance(message, wire.Hello):
            message = msgspec.structs.replace(message, protocol=version)
        return plain(channel, message)

    return send
