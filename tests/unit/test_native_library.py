"""Finding and loading the native library, its statuses as exceptions, and its header as the binding sees it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torpor._native as native
from torpor._native import Op, TorchMode, library, types
from torpor.errors import (
    BugError,
    ConfigurationError,
    DeviceError,
    DeviceMemoryError,
    HostMemoryError,
    StateError,
)

HEADER = Path(__file__).parents[2] / "csrc" / "include" / "torpor" / "torpor.h"


def test_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    with pytest.raises(ConfigurationError, match=r"scripts/build.*pip") as caught:
        native.find_library()
    assert str(tmp_path) in str(caught.value)


def test_every_folder_of_the_package_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / library.LIBRARY_NAME).touch()
    monkeypatch.setattr(native, "__path__", ["/nowhere", str(tmp_path)])
    assert native.find_library() == tmp_path / library.LIBRARY_NAME


def test_the_library_built_in_the_tree_comes_before_an_installed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / library.LIBRARY_NAME).touch()
    here = Path(library.__file__).parent
    monkeypatch.setattr(native, "__path__", [str(tmp_path), str(here)])
    built = (here / library.LIBRARY_NAME).is_file()
    assert native.find_library() == (here if built else tmp_path) / library.LIBRARY_NAME


def test_damaged_library_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / library.LIBRARY_NAME).write_bytes(b"not a library")
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    library.library.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match="cannot load"):
            library.library()
    finally:
        library.library.cache_clear()


def test_other_abi_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    library.library.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match=f"ABI version {found}, this package needs 99"):
            library.library()
    finally:
        library.library.cache_clear()


@pytest.mark.parametrize(
    ("status", "kind", "fields"),
    [
        (library.TP_INVALID, ConfigurationError, {}),
        (library.TP_STATE, StateError, {}),
        (library.TP_DEVICE_MEMORY, DeviceMemoryError, {"bytes_needed": 7, "bytes_free": 3}),
        (library.TP_HOST_MEMORY, HostMemoryError, {"bytes_needed": 7, "bytes_free": 3}),
        (library.TP_DRIVER, DeviceError, {"operation": "unmap", "code": 22}),
        (library.TP_UNSUPPORTED, ConfigurationError, {}),
        (library.TP_INTERNAL, BugError, {}),
    ],
)
def test_status_becomes_exception(status: int, kind: type[Exception], fields: dict[str, object]) -> None:
    error = library.TpError(status=status, op=int(Op.UNMAP), code=22, bytes_needed=7, bytes_free=3, message=b"what happened")
    raised = library.exception_of(error)
    assert type(raised) is kind
    assert str(raised) == "what happened"
    assert raised.fields == fields


def test_binding_has_the_headers_numbers_and_functions() -> None:
    text = HEADER.read_text()
    assert f"#define TP_ABI_VERSION {library.ABI_VERSION}\n" in text
    ops = {name: int(number) for name, number in re.findall(r"TP_OP_(\w+) = (\d+)", text) if name != "COUNT"}
    assert ops == {op.name: op.value for op in Op}
    kinds = {name.lower(): int(number) for name, number in re.findall(r"TP_COPY_(\w+) = (\d+)", text)}
    assert kinds == types.COPY_KINDS
    modes = {name: int(number) for name, number in re.findall(r"TP_TORCH_(\w+) = (\d+)", text)}
    assert modes == {mode.name: mode.value for mode in TorchMode}
    numbers = re.findall(r"(TP_\w+) = (\d+),? +/\*", text)
    statuses = {name: int(number) for name, number in numbers if not name.startswith(("TP_OP", "TP_TORCH"))}
    assert statuses["TP_INTERNAL"] == library.TP_INTERNAL
    assert all(getattr(library, name) == number for name, number in statuses.items())
    functions = set(re.findall(r"^(?:tp_status|int32_t) (tp_\w+)\(", text, re.MULTILINE))
    assert functions == {*library._PROTOTYPES, "tp_abi_version"}
