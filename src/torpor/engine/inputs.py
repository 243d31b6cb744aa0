"""A step's inputs: written on the host, sent to the device in one copy, read there at addresses that never change.

All but the block tables lie one after another in one tensor, so that one copy carries them:

    [ token ids | positions | slots | lengths | places in the block tables | what goes there ]     each part 128 bytes aligned

A part begins where the sizes of the step put it, so a captured step finds its parts at the same addresses in every replay.
Block tables change little from step to step: only what differs from what the device has is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from torpor.models.attention import PagedBatch
from torpor.scheduler.output import ScheduledSequence

Int64Array = npt.NDArray[np.int64]

_ALIGN = 16  # elements: kernels read what begins at a multiple of 128 bytes fastest
_MOST_UPDATES = 8192  # entries of block tables in one step; more are sent as whole tables


class TensorPool(Protocol):
    """The part of ``torpor.memory.Pool`` that inputs need."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """Views of the inputs for one step: T tokens of S sequences."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class _Part:
    values: Sequence[int] | Int64Array
    count: int  # with padding
    padding: int = 0


class StepInputs:
    """Of one runner; for one thread. Whoever calls ``write`` has waited for the step before to end."""

    def __init__(self, pool: TensorPool, *, max_tokens: int, max_seqs: int, blocks_per_seq: int, block_size: int) -> None:
        self.max_tokens, self.max_seqs, self.block_size = max_tokens, max_seqs, block_size
        self.blocks_per_seq = blocks_per_seq
        size = 3 * _aligned(max_tokens) + _aligned(max_seqs) + 2 * _aligned(_MOST_UPDATES)
        self.packed = pool.zeros((size,), torch.int64)
        self.block_tables = pool.zeros((max_seqs, blocks_per_seq), torch.int64)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=self.packed.is_cuda)
        self._host_array: Int64Array = self._host.numpy()
        self._tables: Int64Array = np.zeros((max_seqs, blocks_per_seq), dtype=np.int64)  # what the device has
        self._rows: list[list[int]] = [[] for _ in range(max_seqs)]  # the same, as the lists that it came from

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that lies on the device."""
        return self.packed, self.block_tables

    def forget(self) -> None:
        """The device's block tables are lost: the next step sends its own whole."""
        self._rows = [[] for _ in range(self.max_seqs)]

    def write(self, sequences: Sequence[ScheduledSequence], *, fresh: bool) -> StepTensors:
        """Bring the inputs of a step to the device; single-token sequences come first. Blocks on nothing but, where ``fresh``
        wants to know which blocks this step begins, on their way to the device."""
        counts = [len(s.token_ids) for s in sequences]
        parts, slots, changes = self._parts(sequences, counts, 0)
        views = self._send(parts, changes)
        seq_lens = tuple(parts[3].values)
        batch = self._batch(views, (0, *np.cumsum(counts).tolist()), seq_lens, max(seq_lens))
        if fresh:
            begun = slots[slots % self.block_size == 0] // self.block_size
            batch = replace(batch, fresh_blocks=torch.from_numpy(begun).to(batch.slots.device))
        return StepTensors(token_ids=views[0], positions=views[1], batch=batch)

    def write_padded(self, sequences: Sequence[ScheduledSequence], seqs: int) -> None:
        """The same for single tokens, to where a step captured over ``padding(seqs)`` reads them. Rows beyond the real ones have
        no slot (-1) and no context."""
        parts, _, changes = self._parts(sequences, [1] * len(sequences), seqs)
        self._send(parts, changes)

    def padding(self, seqs: int, max_seq_len: int) -> StepTensors:
        """A step of ``seqs`` single tokens that change nothing: what a capture runs over. ``max_seq_len``: of every replay."""
        views = self._send([_Part([], seqs), _Part([], seqs), _Part([], seqs, -1), _Part([], seqs)], [])
        batch = self._batch(views, tuple(range(seqs + 1)), (max_seq_len,) * seqs, max_seq_len)
        return StepTensors(token_ids=views[0], positions=views[1], batch=batch)

    def _parts(
        self, sequences: Sequence[ScheduledSequence], counts: list[int], padded: int
    ) -> tuple[list[_Part], Int64Array, list[tuple[int, int]]]:
        """What is sent, the slot of every token, and the changes of block tables."""
        changes = self._update_tables([s.block_ids for s in sequences])
        positions, rows = _positions(sequences, counts)
        blocks = self._tables[rows, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        token_ids = list(chain.from_iterable(s.token_ids for s in sequences))
        seq_lens = [s.start + count for s, count in zip(sequences, counts, strict=True)]
        tokens, seqs = max(len(positions), padded), max(len(sequences), padded)
        parts = [_Part(token_ids, tokens), _Part(positions, tokens), _Part(slots, tokens, -1), _Part(seq_lens, seqs)]
        return parts, slots, changes

    def _batch(
        self, views: Sequence[torch.Tensor], starts: tuple[int, ...], seq_lens: tuple[int, ...], max_seq_len: int
    ) -> PagedBatch:
        return PagedBatch(
            block_size=self.block_size,
            query_starts=starts,
            seq_lens=seq_lens,
            max_seq_len=max_seq_len,
            num_single=sum(end - start == 1 for start, end in pairwise(starts)),
            slots=views[2],
            fresh_blocks=self.packed[:0],
            block_tables=self.block_tables[: len(seq_lens)],
            seq_lens_tensor=views[3],
        )

    def _update_tables(self, tables: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Note the step's tables as what the device has. Returns (place, block) of every entry that it does not have yet."""
        changes: list[tuple[int, int]] = []
        for row, table in enumerate(tables):
            have = self._rows[row]
            if have == table:
                continue
            kept = len(have) if have == table[: len(have)] else 0
            new = list(table[kept : self.blocks_per_seq])
            self._tables[row, kept : kept + len(new)] = new
            self._rows[row] = list(table)
            base = row * self.blocks_per_seq + kept
            changes.extend(zip(range(base, base + len(new)), new, strict=True))
        return changes

    def _send(self, parts: Sequence[_Part], changes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Returns the device's view of each part."""
        views = []
        at = 0
        for part in parts:
            self._host_array[at : at + len(part.values)] = part.values
            self._host_array[at + len(part.values) : at + part.count] = part.padding
            views.append(self.packed[at : at + part.count])
            at += _aligned(part.count)
        if len(changes) > _MOST_UPDATES:
            self.block_tables.copy_(torch.from_numpy(self._tables))
            changes = ()
        count, width = len(changes), _aligned(len(changes))
        if count:
            table = np.array(changes, dtype=np.int64)
            self._host_array[at : at + count] = table[:, 0]
            self._host_array[at + width : at + width + count] = table[:, 1]
        end = at + 2 * width
        self.packed[:end].copy_(self._host[:end], non_blocking=True)
        if count:
            places, blocks = self.packed[at : at + count], self.packed[at + width : at + width + count]
            self.block_tables.view(-1).index_copy_(0, places, blocks)
        return views


def _positions(sequences: Sequence[ScheduledSequence], counts: list[int]) -> tuple[Int64Array, Int64Array]:
    """Of every token: its position, and the row of its sequence."""
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    if len(counts) == sum(counts):
        return starts, np.arange(len(counts))
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    return np.arange(ends[-1]) + (starts - ends + counts)[rows], rows


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
