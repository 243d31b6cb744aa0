"""``LLM`` from the thread of a person: what an interrupt in the middle of a start leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from torpor import LLM
from torpor.engine import llm as llm_module


def test_an_interrupt_while_it_starts_gives_everything_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the process lives on: an engine whose start is put away half would keep its memory for as long."""
    ended: list[str] = []

    async def start(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C reaches the main thread, which waits for us
        try:
            await asyncio.sleep(3600)
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            await asyncio.to_thread(ended.append, "core")
            ended.append("all")

    monkeypatch.setattr(llm_module, "_start_client", start)
    with pytest.raises(KeyboardInterrupt):
        LLM("fake")
    assert ended == ["core", "all"]
