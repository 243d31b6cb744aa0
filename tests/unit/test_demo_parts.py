"""The parts of the demo that need no engines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torpor.demo import fleet
from torpor.demo.pair import served_name
from torpor.demo.questions import QUESTIONS
from torpor.demo.random_model import save_random_8b, save_random_model
from torpor.demo.run import DemoConfig, Outcome, Row, sleep_once
from torpor.models import ModelConfig, resolve_model


def test_a_random_model_is_the_same_every_time(tmp_path: Path) -> None:
    """P and D may be started from two of them: peers compare the model's id."""
    one, two = (resolve_model(ModelConfig(source=str(save_random_model(tmp_path / name / "random")))) for name in "ab")
    assert one.model_id == two.model_id
    assert one.name == "random"


@pytest.mark.parametrize(
    ("source", "name"),
    [("builtin:smollm2-135m", "smollm2-135m"), ("/models/Qwen3-8B/", "Qwen3-8B"), ("here/tiny.Q4_1.gguf", "tiny.Q4_1")],
)
def test_a_model_is_asked_for_by_the_name_it_is_served_under(source: str, name: str) -> None:
    assert served_name(source) == name


@pytest.mark.parametrize(("driver", "gpus", "devices"), [("host", 2, (0, 0)), ("cuda", 1, (0, 0)), ("cuda", 2, (0, 1))])
def test_each_engine_takes_a_gpu_where_there_are_two(
    driver: str, gpus: int, devices: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert DemoConfig(memory_driver=driver).pair("ipc").devices == devices


def test_the_large_model_has_a_word_for_each_token_and_needs_no_weights(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save_random_8b(tmp_path / "large")
    model = resolve_model(ModelConfig(source=str(folder), load_format="random"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.checkpoint is None
    assert len(tokenizer) == model.hf_config.vocab_size == 151936
    assert tokenizer.decode([72, 105, 300, 151935]) == "Hi w300 w151935"
    assert tokenizer("Hi").input_ids == [72, 105]
    assert model.eos_token_ids == (tokenizer.eos_token_id,)


def test_the_large_model_runs_in_bf16_with_answers_that_do_not_depend_on_the_batch() -> None:
    pair = DemoConfig(model="random:qwen3-8b", large=True).pair("ipc")
    assert pair.dtype == "bfloat16"
    assert "--deterministic" in pair.flags


class PairOfWords:
    """A pair whose router leaves P out from the sleep until it is waited for, and whose D reads P's KV, or never does."""

    def __init__(self, reads: bool) -> None:
        self.prefill, self.decode = SimpleNamespace(name="P"), SimpleNamespace(name="D")
        self._reads, self._routed, self._pulls = reads, True, 0

    def memory(self, service: Any) -> dict[str, Any]:
        return {"memory": {"tags": [{"resident_bytes": 7}]}}

    def sleep(self, service: Any, level: int) -> dict[str, Any]:
        self._routed = False
        return {"unmapped_bytes": 7, "returned_bytes": 7, "seconds": 0.1}

    def wake(self, service: Any) -> dict[str, Any]:
        return {"seconds": 0.1}

    def wait_routed(self) -> None:
        self._routed = True

    def pulls(self) -> int:
        return self._pulls

    def ask(self, questions: Sequence[str]) -> list[str]:
        self._pulls += len(questions) if self._reads and self._routed else 0
        return list(questions)


def slept(reads: bool) -> Row:
    return sleep_once(PairOfWords(reads), "D+P", 1, 1, list(QUESTIONS))  # type: ignore[arg-type]


def test_p5_answers_that_d_computed_alone_do_not_pass_for_those_of_a_woken_p() -> None:
    """A P that had lost its weights would not show in them."""
    whole, alone = slept(reads=True), slept(reads=False)
    assert (whole.identical, whole.pulls, whole.passed) == (8, 8, True)
    assert (alone.identical, alone.pulls, alone.passed) == (8, 0, False)
    assert Outcome(connector="ipc", rows=(whole, whole)).passed
    assert not Outcome(connector="ipc", rows=(whole, alone)).passed
    assert not Outcome(connector="ipc").passed
    assert [row["passed"] for row in Outcome(connector="ipc", rows=(whole, alone)).as_dict()["rows"]] == [True, False]


ENDLESS_DEMO = """
import pathlib, sys, tempfile, time
import torpor.cli.demo as command
from torpor.demo.fleet import Fleet

def run_demo(config, console):
    with Fleet(pathlib.Path(sys.argv[1])) as fleet:
        router = fleet.start("router", ["router", "--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9"])
        print(router.process.pid, flush=True)
        time.sleep(600)

command.run_demo = run_demo
command.demo()
"""


def test_a_demo_that_is_told_to_end_leaves_no_engine_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDLESS_DEMO, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        child = int(demo.stdout.readline())
        demo.send_signal(signal.SIGTERM)
        status = demo.wait(60)
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        assert status == 128 + signal.SIGTERM
    else:
        pytest.fail("its router lived on")


def test_a_free_port_is_none_that_a_connection_takes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "range"
    taken.write_text("20000\t60999\n")
    monkeypatch.setattr(fleet, "EPHEMERAL", taken)
    ports = set(fleet.free_ports(20))
    assert len(ports) == 20
    assert all(10_000 <= port < 20_000 for port in ports)


def test_a_free_port_where_connections_may_take_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = tmp_path / "range"
    everything.write_text("1024\t65535\n")
    for there in (everything, tmp_path / "none"):
        monkeypatch.setattr(fleet, "EPHEMERAL", there)
        with socket.create_server(("127.0.0.1", fleet.free_port())):
            pass
