"""A step's inputs: what the device reads is what the step says, however little of it was sent."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import GREEDY, Driven, make_worker, prompts, run_step, save_tiny

from torpor.engine.graphs import bucket_sizes
from torpor.engine.inputs import StepInputs
from torpor.kvcache.types import BlockId
from torpor.scheduler.output import ScheduledSequence
from torpor.scheduler.token_counts import TokenCounts

BLOCK = 4


class Plain:
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


def inputs(**sizes: int) -> StepInputs:
    return StepInputs(Plain(), **{"max_tokens": 64, "max_seqs": 8, "blocks_per_seq": 16, "block_size": BLOCK} | sizes)


def share(tokens: list[int], start: int, blocks: list[int]) -> ScheduledSequence:
    return ScheduledSequence(
        request_id="r",
        token_ids=tokens,
        start=start,
        block_ids=[BlockId(block) for block in blocks],
        samples=True,
        sampling=GREEDY,
        counts=TokenCounts([], []),
    )


def check(step: Any, sequences: list[ScheduledSequence]) -> None:
    batch = step.batch
    assert step.token_ids.tolist() == [token for s in sequences for token in s.token_ids]
    positions = [p for s in sequences for p in range(s.start, s.start + len(s.token_ids))]
    assert step.positions.tolist() == positions
    blocks = [s.block_ids[p // BLOCK] for s in sequences for p in range(s.start, s.start + len(s.token_ids))]
    assert batch.slots.tolist() == [b * BLOCK + p % BLOCK for b, p in zip(blocks, positions, strict=True)]
    assert batch.seq_lens == tuple(s.start + len(s.token_ids) for s in sequences)
    assert batch.seq_lens_tensor.tolist() == list(batch.seq_lens)
    assert batch.max_seq_len == max(batch.seq_lens)
    assert batch.num_single == sum(len(s.token_ids) == 1 for s in sequences)
    assert batch.query_starts[-1] == len(positions)
    for row, s in zip(batch.block_tables.tolist(), sequences, strict=True):
        assert row[: len(s.block_ids)] == s.block_ids


@pytest.mark.parametrize("seed", range(5))
def test_steps_in_any_order_say_what_was_asked(seed: int) -> None:
    """Tables grow, shrink, move to other rows and are replaced; the device has what the step says every time."""
    rng, made = random.Random(seed), inputs()
    tables: list[list[int]] = []
    for _ in range(60):
        tables = [table + [rng.randrange(99)] * rng.randrange(2) for table in tables if rng.random() < 0.9 and len(table) < 15]
        while len(tables) < rng.randrange(1, 9):
            tables.insert(rng.randrange(len(tables) + 1), [rng.randrange(99) for _ in range(rng.randrange(1, 5))])
        sequences = []
        for table in tables:
            count = rng.choice([1, 1, rng.randrange(1, min(len(table) * BLOCK, 7) + 1)])
            sequences.append(share([rng.randrange(9)] * count, rng.randrange(len(table) * BLOCK - count + 1), list(table)))
        sequences.sort(key=lambda s: len(s.token_ids) > 1)
        check(made.write(sequences, fresh=True), sequences)
        if rng.random() < 0.1:
            made.block_tables.fill_(-7)
            made.forget()


def test_fresh_blocks_are_those_whose_first_slot_is_written() -> None:
    made = inputs()
    step = made.write([share([1], 4, [5, 6]), share([1] * 6, 3, [7, 8, 9])], fresh=True)
    assert step.batch.fresh_blocks.tolist() == [6, 8, 9]
    assert made.write([share([1], 4, [5, 6])], fresh=False).batch.fresh_blocks.numel() == 0


def test_only_changes_of_block_tables_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sent = inputs(), []
    send = made._send
    monkeypatch.setattr(made, "_send", lambda parts, changes: sent.append(len(changes)) or send(parts, changes))
    for table in ([1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [1, 9, 3, 4], [5]):
        made.write([share([1], 0, table)], fresh=False)
    assert sent == [3, 0, 1, 4, 1]


def test_more_changes_than_are_sent_one_by_one() -> None:
    made = inputs(max_seqs=4, blocks_per_seq=4000)
    tables = [list(range(row, row + 4000)) for row in range(4)]
    sequences = [share([1], 15_999, table) for table in tables]
    check(made.write(sequences, fresh=False), sequences)


def test_a_padded_step_is_where_the_captured_one_reads_and_its_padding_writes_nothing() -> None:
    made = inputs()
    captured = made.padding(4, 64)
    assert captured.batch.slots.tolist() == [-1] * 4
    assert captured.batch.num_single == 4
    assert captured.batch.max_seq_len == 64
    sequences = [share([7], 5, [3, 4]), share([8], 2, [9])]
    made.write_padded(sequences, 4)
    assert captured.token_ids.tolist() == [7, 8, 0, 0]
    assert captured.positions.tolist() == [5, 2, 0, 0]
    assert captured.batch.slots.tolist() == [4 * BLOCK + 1, 9 * BLOCK + 2, -1, -1]
    assert captured.batch.seq_lens_tensor.tolist() == [6, 3, 0, 0]
    assert captured.batch.block_tables[:2, 0].tolist() == [3, 9]


@pytest.mark.parametrize("most", [1, 2, 3, 11, 64, 250, 256, 300, 1024])
def test_buckets_end_at_the_largest_step_and_waste_little(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert all(after <= max(2 * before, before + 32) for before, after in pairwise(sizes))


def test_after_a_failed_step_the_block_tables_are_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how much of them arrived."""
    save_tiny(tmp_path)
    worker = make_worker(tmp_path)
    try:
        runner = worker._runner
        assert runner is not None
        lost = Driven("a", prompts(9)[0]).take(9, list(range(10)))
        monkeypatch.setattr(worker.model, "forward", lambda *arguments, **keywords: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            run_step(worker, [lost])
        monkeypatch.undo()
        runner.inputs.block_tables.fill_(-1)
        run_step(worker, [lost])
        assert runner.inputs.block_tables[0, : len(lost.block_ids)].tolist() == lost.block_ids
    finally:
        worker.shutdown()
