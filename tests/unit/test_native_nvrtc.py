"""The run-time compiler is found in the folders of pip's wheels, and its absence is no error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torpor._native.library import find_library
from torpor._native.nvrtc import load_nvrtc


@pytest.fixture(autouse=True)
def forgetful() -> None:
    load_nvrtc.cache_clear()


def test_none_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert load_nvrtc() is None


def test_one_that_does_not_load_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, whole = tmp_path / "nvidia/cu13/lib/libnvrtc.so.13", tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    for path in (broken, whole):
        path.parent.mkdir(parents=True)
    broken.write_bytes(b"no library")
    whole.symlink_to(find_library())  # any library
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert load_nvrtc() == whole
