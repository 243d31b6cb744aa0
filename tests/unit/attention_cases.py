"""Random batches over paged KV, and what attention gives for them in float32: what every backend is held to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torpor.models.attention import AttentionBackend, AttentionLayer, PagedBatch

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""|got - expected| / |expected|. What rounding the result and the softmax's weights costs, doubled."""
NOBODYS = 1 << 40  # a block id that no cache has: reading it faults


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one batch looks like. ``sequences``: tokens in this step, and tokens in the cache with them; single ones first."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(scaling=self.head_dim**-0.5, sliding_window=self.window, softcap=self.softcap)


@dataclass(frozen=True)
class Case:
    """``expected`` [T, heads, head_dim] in float32. The cache holds what earlier steps wrote; all else in it is NaN, but where
    ``cleared`` the rest of every block that a sequence has begun."""

    shape: Shape
    batch: PagedBatch
    cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    expected: torch.Tensor

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        step = backend.begin(self.batch, self.query.dtype)
        step.write_kv(self.key, self.value, self.cache)
        return step.attend(self.shape.layer, self.query, self.key, self.value, self.cache)

    def error(self, got: torch.Tensor) -> float:
        assert got.shape == self.expected.shape
        assert got.dtype == self.query.dtype
        return float((got.float() - self.expected).norm() / self.expected.norm())


def make_case(
    shape: Shape, dtype: torch.dtype, device: str, *, seed: int = 0, cleared: bool = False, spare_blocks: int = 5
) -> Case:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = sum(-(-length // shape.block_size) for _, length in shape.sequences)
    ids = list(range(needed + spare_blocks))
    rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(-(-length // shape.block_size))] for _, length in shape.sequences]
    blank = (2, needed + spare_blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    cache = torch.full(blank, float("nan"), dtype=dtype, device=device)
    flat = cache.view(2, -1, shape.kv_heads, shape.head_dim)
    tokens, queries, news, expected = [], [], [], []
    for (count, length), table in zip(shape.sequences, tables, strict=True):
        positions = torch.arange(length)
        slots = torch.tensor(table)[positions // shape.block_size] * shape.block_size + positions % shape.block_size
        query = torch.randn(count, shape.heads, shape.head_dim, generator=generator).to(device, dtype)
        context = torch.randn(2, length, shape.kv_heads, shape.head_dim, generator=generator).to(device, dtype)
        if cleared and length > count:
            cache[:, table[: -(-(length - count) // shape.block_size)]] = 0
        flat[:, slots[: length - count].to(device)] = context[:, : length - count]
        tokens.append(slots[length - count :])
        queries.append(query)
        news.append(context[:, length - count :])
        expected.append(reference(shape, query, *context))
    new = torch.cat(news, dim=1)
    batch = make_batch(shape, tables, torch.cat(tokens), device)
    return Case(shape, batch, cache, torch.cat(queries), new[0], new[1], torch.cat(expected))


def make_batch(shape: Shape, tables: Sequence[Sequence[int]], slots: torch.Tensor, device: str) -> PagedBatch:
    padded = torch.full((len(tables), max(map(len, tables)) + 3), NOBODYS)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = torch.tensor(table)
    starts = [0]
    for count, _ in shape.sequences:
        starts.append(starts[-1] + count)
    lens = tuple(length for _, length in shape.sequences)
    return PagedBatch(
        block_size=shape.block_size,
        query_starts=tuple(starts),
        seq_lens=lens,
        max_seq_len=max(lens),
        num_single=sum(count == 1 for count, _ in shape.sequences),
        slots=slots.to(device),
        fresh_blocks=(slots[slots % shape.block_size == 0] // shape.block_size).to(device),
        block_tables=padded.to(device),
        seq_lens_tensor=torch.tensor(lens, device=device),
    )


def reference(shape: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence in float32: query [Q, heads, D] at the end of key and value [L, kv heads, D]."""
    group = shape.heads // shape.kv_heads
    key, value = (t.float().repeat_interleave(group, dim=1).transpose(0, 1) for t in (key, value))
    scores = query.float().transpose(0, 1) @ key.transpose(1, 2) * shape.layer.scaling
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    length = key.shape[1]
    keys = torch.arange(length, device=key.device)
    queries = torch.arange(length - query.shape[0], length, device=key.device)[:, None]
    visible = keys <= queries
    if shape.window is not None:
        visible &= keys > queries - shape.window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ value).transpose(0, 1)


HEADS = ((32, 8), (8, 8), (9, 3), (28, 4), (16, 1))


def random_shape(rng: random.Random, *, longest: int, most: int, head_dims: Sequence[int]) -> Shape:
    """Up to ``most`` sequences, decoding ones, prompts and chunks behind a prefix, of up to ``longest`` tokens; a few of one
    token or of whole blocks."""
    block_size = rng.choice((8, 16, 32, 64))

    def length() -> int:
        return rng.choice((rng.randint(1, longest), rng.randint(1, min(longest, 40)), block_size * rng.randint(1, 3), 1))

    singles = [(1, length()) for _ in range(rng.randint(0, most))]
    chunks = [(rng.randint(1, n), n) for n in (length() for _ in range(rng.randint(0, max(1, most // 3))))]
    sequences = sorted([*singles, *chunks], key=lambda s: s[0] > 1) or [(1, length())]
    heads, kv_heads = rng.choice(HEADS)
    return Shape(
        sequences=tuple(sequences),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=rng.choice(head_dims),
        block_size=block_size,
        window=rng.choice((None, None, 1, rng.randint(2, longest))),
        softcap=rng.choice((None, None, 2.0)),
    )


def pad(case: Case, *, rows: int, max_seq_len: int) -> Case:
    """A batch of single tokens as a captured step sees it: with ``rows`` of padding, and no lengths in its tuples."""
    batch = case.batch
    count = len(batch.seq_lens) + rows
    tail = torch.zeros(rows, dtype=torch.int64, device=batch.slots.device)
    padded = replace(
        batch,
        query_starts=tuple(range(count + 1)),
        seq_lens=(max_seq_len,) * count,
        max_seq_len=max_seq_len,
        num_single=count,
        slots=torch.cat([batch.slots, tail - 1]),
        block_tables=torch.cat([batch.block_tables, batch.block_tables[:1].expand(rows, -1)]),
        seq_lens_tensor=torch.cat([batch.seq_lens_tensor, tail]),
    )
    query, key, value = (torch.cat([t, torch.full_like(t[:rows], 7.0)]) for t in (case.query, case.key, case.value))
    return replace(case, batch=padded, query=query, key=key, value=value)


def part(case: Case, begin: int, end: int) -> Case:
    """Tokens [begin, end) of a batch of one prompt, over the same cache."""
    batch = replace(
        case.batch,
        query_starts=(0, end - begin),
        seq_lens=(end,),
        max_seq_len=end,
        num_single=int(end - begin == 1),
        slots=case.batch.slots[begin:end],
        seq_lens_tensor=torch.tensor([end], device=case.batch.slots.device),
    )
    query, key, value = (t[begin:end] for t in (case.query, case.key, case.value))
    return replace(case, batch=batch, query=query, key=key, value=value)


def beside(first: Case, second: Case) -> Case:
    """Two single tokens in one batch. Both caches in one: the second's blocks come after the first's."""
    shift = first.cache.shape[1]
    width = max(c.batch.block_tables.shape[1] for c in (first, second))
    tables = [
        torch.nn.functional.pad(c.batch.block_tables + by, (0, width - c.batch.block_tables.shape[1]))
        for c, by in ((first, 0), (second, shift))
    ]
    batch = replace(
        first.batch,
        query_starts=(0, 1, 2),
        seq_lens=(*first.batch.seq_lens, *second.batch.seq_lens),
        max_seq_len=max(first.batch.max_seq_len, second.batch.max_seq_len),
        num_single=2,
        slots=torch.cat([first.batch.slots, second.batch.slots + shift * first.shape.block_size]),
        block_tables=torch.cat(tables),
        seq_lens_tensor=torch.cat([first.batch.seq_lens_tensor, second.batch.seq_lens_tensor]),
    )
    names = ("query", "key", "value")
    tensors = {name: torch.cat([getattr(first, name), getattr(second, name)]) for name in names}
    return replace(first, batch=batch, cache=torch.cat([first.cache, second.cache], dim=1), **tensors)
