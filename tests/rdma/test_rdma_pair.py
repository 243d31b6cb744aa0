"""A prefill/decode pair over RDMA: whoever of it slept, the answers are those of before, byte for byte."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rdma_child import Child
from rdma_transports import RDMA_ONLY, SLOW

from torpor.connectors import ConnectorConfig
from torpor.engine.llm import LLM
from torpor.memory.procfs import pinned_bytes
from torpor.request import SamplingParams

# Slow: an emulated processor takes minutes to import and make the model.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

START_S = ANSWER_S = 300.0
LEASE_S = 600.0  # every hand-off is read, however slow the machine
PROMPTS = [list(f"{n}: a prompt of a few blocks of the KV cache".encode()) for n in range(30)]
TOKENS = 6
AT_ONCE = 15
HAND_OFF = {"do_remote_decode": True, "do_remote_prefill": False}


class Engine:
    """An engine with a random model of three layers; what it says is nonsense, and always the same."""

    def __init__(self, model: Path, role: Any) -> None:
        connector = ConnectorConfig(connector="nixl", role=role, withdraw_timeout_s=30.0, extra=RDMA_ONLY | SLOW)
        self.llm = LLM(
            str(model),
            enable_sleep_mode=True,
            connector=connector,
            dtype="float32",
            num_blocks=512,
            max_num_seqs=AT_ONCE,
            handoff_lease_s=LEASE_S,
        )

    def prefill(self, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """What the client gets to hand to the decode engine."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [params for _, params in pool.map(lambda prompt: self._ask(prompt, 1, HAND_OFF), prompts)]

    def answers(self, prompts: Sequence[list[int]], params: Sequence[dict[str, Any] | None]) -> list[list[int]]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [tokens for tokens, _ in pool.map(lambda prompt, given: self._ask(prompt, TOKENS, given), prompts, params)]

    def _ask(self, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> tuple[list[int], dict[str, Any]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (result,) = self.llm.generate(prompt, sampling, kv_transfer_params=params)
        return result.outputs[0].token_ids, result.kv_transfer_params or {}

    def loads_done(self) -> int:
        return int(self.llm.stats()["scheduler"]["loads_done"])

    def sleep(self, level: int) -> dict[str, Any]:
        return self.llm.sleep(level)

    def wake_up(self) -> dict[str, Any]:
        return self.llm.wake_up()

    def pinned(self) -> int:
        return pinned_bytes()

    def close(self) -> None:
        self.llm.close()


@pytest.fixture(scope="module")
def model(rdma_device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torpor.demo.random_model import save_random_model

    torch.set_num_threads(1)
    return save_random_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[tuple[Child, Child]]:
    prefill = Child(functools.partial(Engine, model, "producer"), START_S)
    decode = Child(functools.partial(Engine, model, "consumer"), START_S)
    yield prefill, decode
    decode.close()
    prefill.close()


def ask_pair(prefill: Child, decode: Child) -> list[list[int]]:
    """Every prompt's answer: its KV computed by P, read over RDMA by D."""
    loads = decode.call("loads_done")
    params = prefill.call("prefill", PROMPTS, limit_s=ANSWER_S)
    answers: list[list[int]] = decode.call("answers", PROMPTS, params, limit_s=ANSWER_S)
    assert decode.call("loads_done") == loads + len(PROMPTS), "every prompt's KV came from P"
    return answers


@pytest.fixture(scope="module")
def alone(pair: tuple[Child, Child]) -> list[list[int]]:
    """What P says without anybody else, and the pair before anything slept."""
    prefill, decode = pair
    answers: list[list[int]] = prefill.call("answers", PROMPTS, [None] * len(PROMPTS), limit_s=ANSWER_S)
    assert len({tuple(answer) for answer in answers}) > 20, "the same answer to all would prove nothing"
    assert ask_pair(prefill, decode) == answers
    return answers


@pytest.mark.parametrize("cycle", [1, 2])
@pytest.mark.parametrize("who", ["P", "D", "both"])
def test_whoever_slept_thirty_of_thirty_answers_are_identical(
    pair: tuple[Child, Child], alone: list[list[int]], who: str, cycle: int
) -> None:
    prefill, decode = pair
    sleepers = {"P": [prefill], "D": [decode], "both": [decode, prefill]}[who]
    for sleeper in sleepers:
        report = sleeper.call("sleep", 1)
        assert report["unmapped_bytes"] == report["returned_bytes"] > 0, report["tags"]
    for sleeper in reversed(sleepers):
        assert sleeper.call("wake_up")["state"] == "awake"
    answers = ask_pair(prefill, decode)
    identical = sum(a == b for a, b in zip(answers, alone, strict=True))
    assert identical == len(PROMPTS), f"{identical} of {len(PROMPTS)}"
