"""torch's allocator settings while somebody is inside a pool: expandable segments off, all else as it was."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

from torpor.errors import ConfigurationError
from torpor.memory.torch_cuda import Guests, TorchCuda


class FakeMemPool:
    id = (0, 7)


class FakeSettings:
    """As torch treats them: a new text resets options that it does not name, but not ``expandable_segments``."""

    def __init__(self, text: str, flagged: bool) -> None:
        self.flagged = flagged  # does the snapshot take the flag that leaves traces out?
        self.expandable = False
        self.set(text)

    def set(self, text: str) -> None:
        self.text = text
        if found := re.search(r"expandable_segments:(\w+)", text):
            self.expandable = found.group(1) == "True"
        split = re.search(r"max_split_size_mb:(\d+)", text)
        self.max_split_mb = int(split.group(1)) if split else None

    def snapshot(self, asked: Any) -> dict[str, Any]:
        if asked != ((0, 7, False) if self.flagged else (0, 7)):
            raise RuntimeError("bad cast")
        return {
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.text, "expandable_segments": self.expandable},
        }


def install(monkeypatch: pytest.MonkeyPatch, settings: FakeSettings, setter: bool = True) -> None:
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", settings.snapshot, raising=False)
    if setter:
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.set)
    else:
        monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.set)


@pytest.mark.parametrize("flagged", [True, False])
@pytest.mark.parametrize("setter", [True, False])
def test_expandable_segments_are_off_while_anybody_is_inside(
    monkeypatch: pytest.MonkeyPatch, flagged: bool, setter: bool
) -> None:
    settings = FakeSettings("max_split_size_mb:512,expandable_segments:True", flagged)
    install(monkeypatch, settings, setter)
    guests = Guests()
    guests.enter("a", FakeMemPool())  # type: ignore[arg-type]
    guests.enter("b", FakeMemPool())  # type: ignore[arg-type]
    assert (settings.expandable, settings.max_split_mb) == (False, 512)
    guests.leave("a")
    assert not settings.expandable
    guests.leave("b")
    assert (settings.expandable, settings.max_split_mb) == (True, 512)
    assert settings.text == "max_split_size_mb:512,expandable_segments:True"
    assert guests.nobody


def test_a_setting_that_the_text_no_longer_names_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FakeSettings("expandable_segments:True", True)
    settings.set("max_split_size_mb:64")  # expandable segments are still on
    install(monkeypatch, settings)
    guests = Guests()
    guests.enter("a", FakeMemPool())  # type: ignore[arg-type]
    assert (settings.expandable, settings.max_split_mb) == (False, 64)
    guests.leave("a")
    assert (settings.expandable, settings.max_split_mb) == (True, 64)


def test_what_somebody_sets_meanwhile_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FakeSettings("expandable_segments:True", True)
    install(monkeypatch, settings)
    guests = Guests()
    guests.enter("a", FakeMemPool())  # type: ignore[arg-type]
    settings.set("max_split_size_mb:64")
    guests.leave("a")
    assert settings.text == "max_split_size_mb:64"


def test_nothing_is_set_where_it_was_off(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FakeSettings("max_split_size_mb:64", True)
    install(monkeypatch, settings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", None)
    guests = Guests()
    guests.enter("a", FakeMemPool())  # type: ignore[arg-type]
    guests.leave("a")


def test_the_innermost_is_told_by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeSettings("", True))
    guests = Guests()
    seen: list[object] = []
    for what in ("a", "b"):
        guests.enter(what, FakeMemPool())  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: seen.append(guests.innermost()))
    thread.start()
    thread.join(10)
    assert (seen, guests.innermost()) == ([None], "b")
    guests.leave("a")  # not in order
    assert guests.innermost() == "b"
    guests.leave("b")
    assert guests.innermost() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has CUDA")
def test_a_torch_without_cuda_is_refused_with_the_alternative() -> None:
    with pytest.raises(ConfigurationError, match=r"has no CUDA.*pool\.empty"):
        TorchCuda(0)


def test_another_allocator_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(ConfigurationError, match="backend:native"):
        TorchCuda(0)
