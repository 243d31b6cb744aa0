"""``LLM`` from the thread of a person: what an interrupt in the middle of a start leaves behind."""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from torpor import LLM, SamplingParams
from torpor.engine import llm as llm_module
from torpor.engine.client import InprocEngineClient
from torpor.engine.config import EngineConfig
from torpor.engine.frontend import Frontend
from torpor.engine.tokenizer import Tokenizer
from torpor.errors import ContextLengthError, RequestError
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


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """``LLM`` starts a core with a fake model."""

    async def start(config: EngineConfig, in_process: bool, progress: Any) -> InprocEngineClient:
        return await InprocEngineClient.start(config, factory=lambda **calls: fake_core(config, FakeWorker(), **calls))

    monkeypatch.setattr(llm_module, "_start_client", start)
    monkeypatch.setattr(llm_module.Frontend, "for_client", lambda client, **more: Frontend(client, Tokenizer(byte_tokenizer())))


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("n", [1, 2])
def test_more_prompts_than_may_wait_take_turns(n: int) -> None:
    """A data set is asked at once: the engine's limit is against floods, and one refusal would end all of them."""
    with LLM("fake", max_waiting=3) as llm:
        results = llm.generate([[i, i + 1] for i in range(20)], SamplingParams(max_tokens=3, ignore_eos=True), n=n)
    assert [len(output.token_ids) for result in results for output in result.outputs] == [3] * 20 * n


@pytest.fixture
def llm(fake_engine: None) -> Iterator[LLM]:
    with LLM("fake") as llm:
        yield llm


THREE = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ((97, 98), [[97, 98]]),
        ([(97, 98), "c"], [[97, 98], [99]]),
        ([np.int64(97), np.int32(98)], [[97, 98]]),
        (np.array([97, 98]), [[97, 98]]),
        (np.array([[97], [98]]), [[97], [98]]),
        ([np.array([97, 98]), [99]], [[97, 98], [99]]),
        ([], []),
    ],
    ids=repr,
)
def test_every_kind_of_prompt_has_its_answer(llm: LLM, prompts: Any, ids: list[list[int]]) -> None:
    results = llm.generate(prompts, THREE)
    assert [result.prompt_token_ids for result in results] == ids
    assert all(type(token_id) is int for result in results for token_id in result.prompt_token_ids)
    assert [len(result.outputs[0].token_ids) for result in results] == [3] * len(ids)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", 5], r"prompts\[1\] must be a text or a list of token ids, not 5"),
        ([5, "a"], r"prompts\[0\] .* not 5"),
        (["a", None], r"prompts\[1\] .* not None"),
        (["a", {"prompt": "b"}], r"prompts\[1\] .* not {'prompt': 'b'}"),
        ([[1], [1, "b"]], r"prompts\[1\] .* not \[1, 'b'\]"),
        ([1.5, 2], r"prompts\[0\] .* not 1.5"),
        ([b"ab"], r"prompts\[0\] .* not b'ab'"),
        ([["x" * 1000]], r"prompts\[0\] .*\.\.\. \(list\)$"),
        (b"ab", "prompts must be"),
        ({"prompt": "a"}, "prompts must be"),
        (7, "prompts must be"),
        ([[1, True]], "integers"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, THREE)
    with pytest.raises(RequestError, match="n must be"):
        llm.generate("a", THREE, n=1.5)  # type: ignore[arg-type]


def test_one_conversation_and_several(llm: LLM) -> None:
    hi, ho = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]
    asked = {"one": hi, "several": [hi, ho], "tuples": (tuple(hi), ho), "none": []}
    found = {name: [bytes(r.prompt_token_ids) for r in llm.chat(given, THREE)] for name, given in asked.items()}  # type: ignore[arg-type]
    both = [b"user: hi\nassistant:", b"user: ho\nassistant:"]
    assert found == {"one": both[:1], "several": both, "tuples": both, "none": []}


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        ("hi", "conversations must be"),
        ({"role": "user", "content": "hi"}, "conversations must be"),
        (["hi"], r"conversations\[0\] must be a list of messages, which are dicts, not 'hi'"),
        ([{"role": "user", "content": "hi"}, "ho"], r"conversations\[0\]"),
        ([[{"role": "user", "content": "hi"}], ["ho"]], r"conversations\[1\]"),
        ([[{"role": "user", "content": "hi"}], None], r"conversations\[1\]"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_place(llm: LLM, conversations: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(conversations, THREE)


def test_a_conversation_that_is_too_long_is_the_fault_of_the_messages(llm: LLM) -> None:
    with pytest.raises(ContextLengthError) as caught:
        llm.chat([{"role": "user", "content": "x" * 200}], THREE)
    assert caught.value.param == "messages"
