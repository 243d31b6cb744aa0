"""Attention by torch's scaled_dot_product_attention: any device torch runs on.

All single-token sequences of similar length are one gather and one kernel per layer; a longer chunk is a kernel of its own over
the blocks before it and itself. Nothing is read twice per step but the K and V themselves: masks and indices are made once per
window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from torpor.errors import ConfigurationError
from torpor.models.attention.base import AttentionBackend, AttentionLayer, AttentionStep, PagedBatch


class SdpaBackend(AttentionBackend):
    name = "sdpa"

    def __init__(self, *, deterministic: bool = False) -> None:
        if deterministic:
            raise ConfigurationError(
                "attention_backend 'sdpa' cannot be deterministic, and without a GPU there is no other: its kernels depend on "
                "which sequences share a step",
                setting="deterministic",
                value=True,
            )
        super().__init__(deterministic=deterministic)

    def begin(self, batch: PagedBatch, dtype: torch.dtype) -> AttentionStep:
        return _SdpaStep(batch, dtype)


@dataclass(frozen=True, slots=True)
class _Singles:
    """Single-token sequences whose contexts are about equally long: one padded gather."""

    rows: torch.Tensor  # [G] of the batch; also their rows among the tokens
    blocks: torch.Tensor  # [G * width] block ids
    width: int  # blocks per sequence
    keep: slice  # of the gathered positions; trims a lone sequence to its exact context
    mask: torch.Tensor | None  # [G, 1, 1, width * block_size], added to the scores


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence."""

    tokens: slice  # of the batch's tokens
    blocks: torch.Tensor | None  # None: the chunk is the whole context
    length: int  # context positions that are gathered
    mask: torch.Tensor | None  # [tokens, length]; None: plain causal, or nothing to hide


@dataclass(frozen=True, slots=True)
class _Plan:
    singles: list[_Singles]
    chunks: list[_Chunk]


class _SdpaStep(AttentionStep):
    def __init__(self, batch: PagedBatch, dtype: torch.dtype) -> None:
        super().__init__(batch)
        self._dtype = dtype
        self._plans: dict[int | None, _Plan] = {}

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        window = layer.sliding_window
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._make_plan(window)
        if len(plan.singles) + len(plan.chunks) == 1:  # it is all of the batch, in its order
            if plan.singles:
                return _attend_singles(layer, plan.singles[0], query, kv_cache)
            return _attend_chunk(layer, plan.chunks[0], query, key, value, kv_cache)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in plan.singles:
            out.index_copy_(0, group.rows, _attend_singles(layer, group, query.index_select(0, group.rows), kv_cache))
        for chunk in plan.chunks:
            out[chunk.tokens] = _attend_chunk(layer, chunk, query[chunk.tokens], key, value, kv_cache)
        return out

    def _make_plan(self, window: int | None) -> _Plan:
        batch = self.batch
        chunks = [self._plan_chunk(row, window) for row in range(batch.num_single, len(batch.seq_lens))]
        return _Plan([self._plan_singles(rows, window) for rows in self._similar_rows(window)], chunks)

    def _similar_rows(self, window: int | None) -> list[list[int]]:
        """The single-token rows in groups whose longest context is at most twice the shortest: at most half of a gather is
        padding."""
        ranges = [self._block_range(seq_len, 1, window) for seq_len in self.batch.seq_lens[: self.batch.num_single]]
        widths = [last - first for first, last in ranges]
        groups: list[list[int]] = []
        widest = 0
        for row in sorted(range(len(widths)), key=widths.__getitem__, reverse=True):
            if 2 * widths[row] < widest or not groups:
                widest = widths[row]
                groups.append([])
            groups[-1].append(row)
        return [sorted(group) for group in groups]

    def _block_range(self, seq_len: int, num_tokens: int, window: int | None) -> tuple[int, int]:
        """The blocks [first, last) that the last ``num_tokens`` of a context of ``seq_len`` see."""
        size = self.batch.block_size
        first = 0 if window is None else max(0, seq_len - num_tokens + 1 - window) // size
        return first, -(-seq_len // size)

    def _plan_singles(self, rows: list[int], window: int | None) -> _Singles:
        batch, size = self.batch, self.batch.block_size
        device = batch.block_tables.device
        ranges = [self._block_range(batch.seq_lens[row], 1, window) for row in rows]
        width = max(last - first for first, last in ranges)
        index = torch.tensor(rows, device=device)
        first = torch.tensor([first for first, _ in ranges], device=device)[:, None]
        last = torch.tensor([last for _, last in ranges], device=device)[:, None]
        columns = first + torch.arange(width, device=device)
        # Padding repeats a block of the sequence's own, whose content is finite.
        blocks = batch.block_tables[index[:, None], torch.where(columns < last, columns, first)].view(-1)
        if len(rows) == 1:
            seq_len, offset = batch.seq_lens[rows[0]], ranges[0][0] * size
            low = 0 if window is None else max(0, seq_len - window)
            return _Singles(index, blocks, width, slice(low - offset, seq_len - offset), None)
        positions = first * size + torch.arange(width * size, device=device)
        lens = batch.seq_lens_tensor.index_select(0, index)[:, None]
        visible = positions < lens
        if window is not None:
            visible &= positions >= lens - window
        return _Singles(index, blocks, width, slice(None), self._additive(visible)[:, None, None, :])

    def _plan_chunk(self, row: int, window: int | None) -> _Chunk:
        batch, size = self.batch, self.batch.block_size
        tokens = slice(batch.query_starts[row], batch.query_starts[row + 1])
        count, seq_len = tokens.stop - tokens.start, batch.seq_lens[row]
        start = seq_len - count
        narrow = window is not None and window < seq_len
        if start == 0 and not narrow:
            return _Chunk(tokens, None, seq_len, None)
        first, last = (0, 0) if start == 0 else self._block_range(seq_len, count, window)
        device = batch.block_tables.device
        keys = torch.arange(first * size, seq_len, device=device)
        queries = torch.arange(start, seq_len, device=device)[:, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        blocks = None if start == 0 else batch.block_tables[row, first:last]
        return _Chunk(tokens, blocks, seq_len - first * size, self._additive(visible))

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        return torch.zeros(visible.shape, dtype=self._dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _attend_singles(layer: AttentionLayer, group: _Singles, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """``query`` holds the group's own tokens."""
    count, heads, head_dim = query.shape
    kv_heads = kv_cache.shape[3]
    # The query heads of one kv head are its "positions": no copy of K and V per query head.
    packed = query.reshape(count, kv_heads, heads // kv_heads, head_dim)
    gathered = kv_cache.index_select(1, group.blocks).view(2, count, -1, kv_heads, head_dim)
    key, value = gathered[:, :, group.keep].transpose(2, 3).unbind(0)
    return _attention(layer, packed, key, value, group.mask, causal=False).reshape(count, heads, head_dim)


def _attend_chunk(
    layer: AttentionLayer, chunk: _Chunk, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
) -> torch.Tensor:
    """``query`` holds the chunk's own tokens, ``key`` and ``value`` those of the whole batch."""
    if chunk.blocks is None:
        key, value = key[chunk.tokens], value[chunk.tokens]
    else:
        key, value = kv_cache.index_select(1, chunk.blocks).flatten(1, 2)[:, : chunk.length].unbind(0)
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    return _attention(layer, query, key, value, chunk.mask, causal=chunk.mask is None)[0].transpose(0, 1)


def _attention(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
) -> torch.Tensor:
    """query [B, heads, Q, D], key and value [B, kv heads, K, D] -> [B, heads, Q, D]."""
    if layer.softcap is None:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=layer.scaling, enable_gqa=grouped
        )
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = query @ key.transpose(2, 3) * layer.scaling
    scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
