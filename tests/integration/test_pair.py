"""A prefill/decode pair started from shells, used by the official client, asleep and awake (E2, E3, E7, E10, P1, P2, P5)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from transformers_answers import transformers_answers

from torpor.demo.fleet import Fleet
from torpor.demo.pair import Pair, PairConfig
from torpor.demo.questions import QUESTIONS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module", params=["ipc", "nixl"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    folder: Path = tmp_path_factory.mktemp(f"pair-{request.param}")
    with Fleet(folder) as fleet:
        yield Pair.start(fleet, PairConfig(connector=request.param), lambda text: None)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> list[str]:
    return pair.ask(QUESTIONS)


@pytest.fixture
def client(pair: Pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.router.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def stream_text(client: openai.OpenAI, question: str, max_tokens: int) -> Iterator[str]:
    messages = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    with contextlib.closing(stream):
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return transformers_answers(PairConfig.model, QUESTIONS, PairConfig.max_tokens)


def test_answers_of_the_pair_are_those_of_transformers(pair: Pair, reference: list[str], expected: list[str]) -> None:
    assert reference == expected
    assert "Paris" in reference[0]
    stats = pair.memory(pair.decode)["connector"]
    assert stats["loads_done"] >= 1
    assert stats["loads_failed"] == 0


def test_streamed_text_is_the_text_in_one_piece(client: openai.OpenAI, pair: Pair, reference: list[str]) -> None:
    assert "".join(stream_text(client, QUESTIONS[0], pair.config.max_tokens)) == reference[0]


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("level", [1, 2])
def test_e3_sleep_gives_memory_back_and_answers_stay(pair: Pair, reference: list[str], who: str, level: int) -> None:
    service = getattr(pair, who)
    report = pair.sleep(service, level)
    assert report["unmapped_bytes"] > 500 << 20
    assert report["returned_bytes"] == report["unmapped_bytes"]
    assert pair._fleet.http.get(f"{service.url}/health").status_code == 200
    assert pair._fleet.http.get(f"{service.url}/ready").status_code == 503
    pair.wake(service)
    assert pair._fleet.http.get(f"{service.url}/ready").status_code == 200
    assert pair.ask(QUESTIONS) == reference


def test_p5_while_p_sleeps_d_prefills_by_itself(pair: Pair, reference: list[str]) -> None:
    pair.sleep(pair.prefill, 1)
    try:
        assert pair.ask(QUESTIONS) == reference
    finally:
        pair.wake(pair.prefill)


def test_e10_while_d_sleeps_the_client_gets_503_and_a_reason(client: openai.OpenAI, pair: Pair) -> None:
    pair.sleep(pair.decode, 1)
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert "asleep" in str(caught.value)
    finally:
        pair.wake(pair.decode)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_sleep_and_wake_in_the_middle_of_a_stream(client: openai.OpenAI, pair: Pair, who: str) -> None:
    """Mode ``keep``: the stream pauses and goes on after the wake, with the text it would have had."""
    service = getattr(pair, who)
    expected = "".join(stream_text(client, QUESTIONS[6], 40))
    pieces: list[str] = []
    stream = stream_text(client, QUESTIONS[6], 40)
    pieces.append(next(stream))
    response = pair._fleet.http.post(f"{service.url}/sleep", params={"level": 1, "mode": "keep", "deadline_s": 30})
    assert response.status_code == 200, response.text
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: list(stream))
        pair.wake(service)
        pieces += rest.result(timeout=60)
    assert "".join(pieces) == expected


def test_p1_a_hand_off_from_before_the_sleep_is_recomputed(pair: Pair, reference: list[str]) -> None:
    """P hands over, sleeps and wakes; D reads late: a new epoch, so D computes the prompt itself and the answer is right."""
    params = pair.prefill_only(QUESTIONS[3])
    pair.sleep(pair.prefill, 1)
    pair.wake(pair.prefill)
    pair.sleep(pair.decode, 1)  # forget the prefix
    pair.wake(pair.decode)
    failed = pair.memory(pair.decode)["connector"]["loads_failed"]
    assert pair.decode_with(QUESTIONS[3], params) == reference[3]
    assert pair.memory(pair.decode)["connector"]["loads_failed"] == failed + 1


def test_p4_a_late_read_at_a_sleeping_engine_kills_nobody(pair: Pair, reference: list[str]) -> None:
    params = pair.prefill_only(QUESTIONS[4])
    pair.sleep(pair.decode, 1)
    pair.wake(pair.decode)
    pair.sleep(pair.prefill, 1)
    try:
        assert pair.decode_with(QUESTIONS[4], params) == reference[4]
        assert pair._fleet.http.get(f"{pair.prefill.url}/health").status_code == 200
    finally:
        pair.wake(pair.prefill)
    assert pair.ask(QUESTIONS) == reference


def in_use(pair: Pair) -> list[int]:
    """Blocks that requests hold on P and on D."""
    return [pair.memory(service)["cache"]["allocated_blocks"] for service in (pair.prefill, pair.decode)]


def test_a_client_that_leaves_frees_its_blocks_on_both_engines(client: openai.OpenAI, pair: Pair) -> None:
    stream = stream_text(client, "Tell me a very long story about a sleepy bear.", 200)
    next(stream)
    assert in_use(pair)[1] > 0
    stream.close()
    deadline = time.monotonic() + 10
    while in_use(pair) != [0, 0] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert in_use(pair) == [0, 0]


def test_a_hand_off_that_d_never_reads_is_freed_by_the_sleep(pair: Pair, reference: list[str]) -> None:
    """Today's engines block such a sleep until the lease is over."""
    pair.prefill_only("A question whose answer nobody fetches.")
    assert in_use(pair)[0] > 0
    assert pair.sleep(pair.prefill, 1)["seconds"] < 10
    pair.wake(pair.prefill)
    assert in_use(pair)[0] == 0
    assert pair.ask(QUESTIONS) == reference


@pytest.mark.parametrize(
    ("path", "query", "named"),
    [
        ("sleep", {"level": 7}, "level"),
        ("sleep", {"mode": "gently"}, "mode"),
        ("sleep", {"deadline_s": -1}, "deadline_s"),
        ("wake_up", {"tags": "wieghts"}, "kv_cache"),
    ],
)
def test_bad_input_is_refused_by_name_and_everybody_else_is_served(
    pair: Pair, reference: list[str], path: str, query: dict[str, str], named: str
) -> None:
    response = pair._fleet.http.post(f"{pair.prefill.url}/{path}", params=query)
    assert 400 <= response.status_code < 500
    assert named in response.json()["error"]["message"]
    assert pair.ask(QUESTIONS[:1]) == reference[:1]


def test_a_p_that_does_not_exist_is_recomputed(pair: Pair, reference: list[str]) -> None:
    params = pair.prefill_only(QUESTIONS[5])
    pair.sleep(pair.decode, 1)
    pair.wake(pair.decode)
    nowhere = {**params, "remote_engine_id": "nobody", "remote_port": 1}
    assert pair.decode_with(QUESTIONS[5], nowhere) == reference[5]


def test_the_example_for_servers_runs(pair: Pair) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "openai_and_sleep.py"
    command = [sys.executable, str(example), pair.router.url, "--engine", pair.prefill.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
