"""The Triton kernels under Triton's interpreter, in this machine's memory. On a GPU: tests/gpu/test_gpu_attention.py."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from attention_cases import TOLERANCES, Case, Shape, make_case, random_shape

from torpor.models.attention import AttentionBackend
from torpor.models.attention.triton_backend import TritonBackend

# The interpreter's numpy: infinities are in the algorithm, and older Tritons take scalars from arrays as numpy no longer likes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

MIXED = ((1, 1), (1, 17), (1, 300), (1, 64), (8, 8), (5, 70), (40, 90))


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off, as it is where a GPU is")
    try:
        make_case(Shape(sequences=((1, 1),)), torch.float32, "cpu").run(TritonBackend())
    except Exception as error:
        if "0-dimensional arrays" not in str(error):
            raise
        pytest.skip("this Triton's interpreter does not work with this numpy: Triton 3.6 wants numpy below 2.4")


@pytest.fixture(params=[False, True], ids=["fast", "deterministic"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return TritonBackend(deterministic=request.param)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 30, 130])
def test_agrees_with_the_reference(backend: AttentionBackend, window: int | None, softcap: float | None) -> None:
    case = make_case(Shape(sequences=MIXED, window=window, softcap=softcap), torch.float32, "cpu")
    assert case.error(case.run(backend)) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("seed", range(12))
def test_agrees_on_random_batches(backend: AttentionBackend, seed: int) -> None:
    shape = random_shape(random.Random(seed), longest=280, most=4, head_dims=(8, 24, 64, 80))
    case = make_case(shape, torch.float32, "cpu", seed=seed)
    assert case.error(case.run(backend)) < TOLERANCES[torch.float32], shape


def test_padding_rows_write_nothing_and_give_something_finite(backend: AttentionBackend) -> None:
    """What a captured step relies on: lengths and slots come from the tensors, whatever the tuples say."""
    case = make_case(Shape(sequences=((1, 9), (1, 200), (1, 33))), torch.float32, "cpu")
    padded = pad(case, rows=2, max_seq_len=512)
    got = padded.run(backend)
    assert case.error(got[:3]) < TOLERANCES[torch.float32]
    assert got[3:].isfinite().all()
    written = case.cache.isnan().logical_not().all(-1).all(-1).sum()
    assert written == 2 * (9 + 200 + 33)


def pad(case: Case, *, rows: int, max_seq_len: int) -> Case:
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


def test_inputs_may_be_strided(backend: AttentionBackend) -> None:
    """As transformers gives them: heads before tokens, and slices of one projection."""
    case = make_case(Shape(sequences=MIXED), torch.float32, "cpu")
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.cat([case.key, case.value], dim=1)
    key, value = both.split(case.shape.kv_heads, dim=1)
    assert case.error(replace(case, query=query, key=key, value=value).run(backend)) < TOLERANCES[torch.float32]


def test_deterministic_tokens_do_not_depend_on_batch_or_chunks() -> None:
    """One prompt: at once, in two chunks cut anywhere, and its last token alone among others."""
    backend = TritonBackend(deterministic=True)
    whole = make_case(Shape(sequences=((90, 90),)), torch.float32, "cpu", seed=4)
    expected = whole.run(backend)
    for cut in (1, 33, 64, 89):
        parts = [part(whole, 0, cut), part(whole, cut, 90)]
        assert torch.equal(torch.cat([p.run(backend) for p in parts]), expected), cut
    other = make_case(Shape(sequences=((1, 200),)), torch.float32, "cpu", seed=5)
    together = beside(part(whole, 89, 90), other)
    assert torch.equal(together.run(backend)[:1], expected[89:])


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
