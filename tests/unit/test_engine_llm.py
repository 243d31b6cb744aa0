"""``LLM`` from the thread of a person: what an interrupt in the middle of a start leaves behind."""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from torpor import LLM, SamplingParams
from torpor.engine import llm as llm_module
from torpor.engine.client import InprocEngineClient
from torpor.engine.config import EngineConfig
from torpor.engine.frontend import Frontend
from torpor.engine.tokenizer import Tokenizer
from torpor.testing.engine import FakeWorker, fake_core
from torpor.testing.tokenizers import byte_tokenizer


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task cannot be asked whether it was cancelled")
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("when", ["while it waits", "as it begins to wait", "before it waits"])
def test_an_interrupt_while_it_starts_gives_everything_back_first(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the process lives on: an engine whose start is put away half would keep its memory for as long."""
    ended: list[str] = []

    async def start(*args: Any) -> Any:
        if when == "while it waits":
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C reaches the main thread, which waits for us
        elif when == "as it begins to wait":
            await asyncio.sleep(0.2)
            _thread.interrupt_main()  # ends no wait: so it is with a signal that comes just before one
        try:
            await asyncio.sleep(3600)
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            await asyncio.to_thread(ended.append, "core")
            ended.append("all")

    def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(work, loop)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_module, "_start_client", start)
    if when == "before it waits":
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM("fake")
    assert ended == ["core", "all"]


@pytest.mark.parametrize("n", [1, 2])
def test_more_prompts_than_may_wait_take_turns(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set is asked at once: the engine's limit is against floods, and one refusal would end all of them."""

    async def start(config: EngineConfig, in_process: bool, progress: Any) -> InprocEngineClient:
        return await InprocEngineClient.start(config, factory=lambda **calls: fake_core(config, FakeWorker(), **calls))

    monkeypatch.setattr(llm_module, "_start_client", start)
    monkeypatch.setattr(llm_module.Frontend, "for_client", lambda client, **more: Frontend(client, Tokenizer(byte_tokenizer())))
    with LLM("fake", max_waiting=3) as llm:
        results = llm.generate([[i, i + 1] for i in range(20)], SamplingParams(max_tokens=3, ignore_eos=True), n=n)
    assert [len(output.token_ids) for result in results for output in result.outputs] == [3] * 20 * n
