"""One step of the runner: what it refuses, what it keeps apart, and where its inputs lie (E1: block tables in ``runtime``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_models import BLOCK, GREEDY, VOCAB, Driven, drive, make_worker, prompts, reference_greedy, run_step, save_tiny

from torpor.engine.worker import Worker
from torpor.errors import BugError, DeviceError, DeviceMemoryError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return path


@pytest.fixture
def worker(folder: Path) -> Iterator[Worker]:
    made = make_worker(folder)
    yield made
    made.shutdown()


def test_step_inputs_and_kv_lie_in_their_pools(worker: Worker) -> None:
    runner = worker._runner
    assert runner is not None
    assert runner.tensors.keys() == {"runtime"}
    assert {worker.memory.tag_of(tensor) for tensor in runner.tensors["runtime"]} == {"runtime"}
    assert {worker.memory.tag_of(tensor) for tensor in runner.kv_caches} == {"kv_cache"}
    assert [t.data_ptr() for t in runner.kv_caches] == [t.data_ptr() for t in worker.kv_caches.values()]


def test_the_same_step_twice_gives_the_same_logprobs(worker: Worker) -> None:
    sampling = msgspec.structs.replace(GREEDY, logprobs=5)
    share = Driven("a", prompts(9)[0], sampling).take(9, list(range(10)))
    assert run_step(worker, [share]) == run_step(worker, [share])


def test_an_empty_step_does_nothing(worker: Worker) -> None:
    assert run_step(worker, []).sampled == {}


def test_prefill_chunks_that_do_not_sample_give_no_token(worker: Worker) -> None:
    sequence = Driven("a", prompts(9)[0])
    free = list(range(10))
    assert run_step(worker, [sequence.take(5, free)]).sampled == {}
    assert run_step(worker, [sequence.take(4, free)]).sampled.keys() == {"a"}


@pytest.mark.parametrize(
    ("count", "blocks"), [(33, 9), (5, 1), (0, 1)], ids=["more tokens than configured", "too few blocks", "no tokens"]
)
def test_a_step_that_does_not_fit_is_a_bug_and_writes_nothing(worker: Worker, count: int, blocks: int) -> None:
    for cache in worker.kv_caches.values():
        cache.fill_(7)
    share = dataclasses.replace(
        Driven("a", prompts(40)[0]).take(40, list(range(20))), token_ids=[1] * count, block_ids=list(range(blocks))
    )
    with pytest.raises(BugError, match="tokens"):
        run_step(worker, [share])
    assert all(bool((cache == 7).all()) for cache in worker.kv_caches.values())


def test_more_sequences_than_configured_is_a_bug(worker: Worker) -> None:
    shares = [Driven(str(i), [1]).take(1, [i]) for i in range(9)]
    with pytest.raises(BugError, match="max_num_seqs"):
        run_step(worker, shares)


def test_logits_that_are_not_finite_fail_one_request_only(worker: Worker, folder: Path) -> None:
    """A NaN in one sequence's KV reaches neither its neighbours in the batch nor the next owner of its blocks."""
    good, bad = Driven("good", prompts(9)[0]), Driven("bad", prompts(6, seed=5)[0])
    free = list(range(20))
    first = run_step(worker, [good.take(9, free), bad.take(6, free)])
    for cache in worker.kv_caches.values():
        cache[:, bad.blocks] = float("nan")
    for sequence in (good, bad):
        sequence.tokens.append(first.sampled[sequence.name])
    second = run_step(worker, [bad.take(1, free), good.take(1, free)])
    assert second.failed.keys() == {"bad"}
    assert second.sampled.keys() == {"good"}

    heirs = [Driven("heir", prompts(5, seed=7)[0]), Driven("other", prompts(11, seed=8)[0])]
    expected = [reference_greedy_of(folder, heir.prompt, 6) for heir in heirs]
    poisoned = list(bad.blocks)
    for heir in heirs:
        heir.blocks = [poisoned.pop()]
    drive(worker, heirs, 6)
    assert [heir.output for heir in heirs] == expected


def test_token_order_within_the_batch_does_not_matter(worker: Worker) -> None:
    sequences = [Driven(str(i), p) for i, p in enumerate(prompts(1, 7, 1, 5))]
    free = list(range(30))
    shares = [s.take(len(s.prompt), free) for s in sequences]
    forward = run_step(worker, shares).sampled
    assert run_step(worker, shares[::-1]).sampled == forward
    assert len(forward) == 4
    assert all(0 <= token < VOCAB for token in forward.values())


def test_the_last_block_may_be_partly_filled(worker: Worker, folder: Path) -> None:
    for length in (BLOCK - 1, BLOCK, BLOCK + 1):
        sequence = Driven(str(length), prompts(length, seed=length)[0])
        drive(worker, [sequence], 4)
        assert sequence.output == reference_greedy_of(folder, sequence.prompt, 4)


def reference_greedy_of(folder: Path, prompt: list[int], count: int) -> list[int]:
    return reference_greedy(save_tiny(folder / "again"), prompt, count)


@pytest.mark.parametrize(
    ("raised", "told"),
    [(torch.OutOfMemoryError("out of memory"), DeviceMemoryError), (torch.AcceleratorError("lost"), DeviceError)],
    ids=["memory", "device"],
)
def test_errors_of_torch_are_told_as_ours(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, raised: Exception, told: type[Exception]
) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise raised

    monkeypatch.setattr(worker.model, "forward", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 10))
    share = Driven("a", prompts(9)[0]).take(9, list(range(10)))
    with pytest.raises(told, match="9 tokens in 1 sequences") as caught:
        run_step(worker, [share])
    assert caught.value.__cause__ is raised
    monkeypatch.undo()
    assert run_step(worker, [share]).sampled.keys() == {"a"}
