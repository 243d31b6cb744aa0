"""Every attention backend that runs here, on the GPU, against float32."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "unit"))

from attention_cases import TOLERANCES, Case, Shape, beside, make_case, pad, part, random_shape

from torpor.models.attention import AttentionBackend, backends, get_backend
from torpor.models.attention.triton_backend import TritonBackend

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BATCHES_S, LEAST_BATCHES, MOST_BATCHES = 6.0, 3, 20


@pytest.fixture(params=backends("cuda"))
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    try:
        return get_backend(request.param, "cuda")
    except ValueError as error:
        pytest.skip(str(error))


def on_gpu(shape: Shape, dtype: torch.dtype, backend: AttentionBackend, seed: int = 0) -> Case:
    return make_case(shape, dtype, "cuda", seed=seed, cleared=backend.clears_blocks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_float32_on_random_batches(backend: AttentionBackend, dtype: torch.dtype) -> None:
    """Stale blocks are NaN, table entries beyond a sequence name no block. As many batches as the time allows: each compiles its
    own kernels."""
    ends, ran = time.monotonic() + BATCHES_S, 0
    for seed in range(MOST_BATCHES):
        shape = random_shape(random.Random(seed), longest=3000, most=20, head_dims=HEAD_DIMS)
        case = on_gpu(shape, dtype, backend, seed)
        try:
            got = case.run(backend)
        except ValueError:  # a shape that this backend refuses
            continue
        assert case.error(got) < TOLERANCES[dtype], (seed, shape)
        ran += 1
        if time.monotonic() > ends and ran >= LEAST_BATCHES:
            break
    assert ran >= LEAST_BATCHES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_long_context_in_pieces(backend: AttentionBackend, dtype: torch.dtype) -> None:
    shape = Shape(sequences=((1, 8192), (1, 5), (1, 1)), heads=32, kv_heads=8, head_dim=128)
    case = on_gpu(shape, dtype, backend)
    for _ in range(3):  # what a call leaves behind must not disturb the next
        assert case.error(case.run(backend)) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_decodes_prompts_and_chunks_of_one_model(backend: AttentionBackend, dtype: torch.dtype) -> None:
    """Qwen3-8B's heads: the batches that every backend can be asked for, without compiling one more kernel for each."""
    steps = (
        ((1, 700), (1, 16), (1, 1), (1, 2048)),
        ((130, 130), (5, 5), (2000, 2000)),
        ((1, 33), (1, 900), (64, 700), (3, 19), (1, 1)),
    )
    for seed, sequences in enumerate(steps):
        ordered = tuple(sorted(sequences, key=lambda s: s[0] > 1))
        case = on_gpu(Shape(sequences=ordered, heads=32, kv_heads=8, head_dim=128), dtype, backend, seed)
        assert case.error(case.run(backend)) < TOLERANCES[dtype], sequences


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("window", [None, 100])
def test_a_captured_step_follows_its_tensors(deterministic: bool, window: int | None) -> None:
    """Captured over padding alone; replayed over other lengths, blocks and numbers of real rows."""
    backend = TritonBackend(deterministic=deterministic)
    rows, bound = 8, 4096
    shape = Shape(sequences=((1, 1),) * rows, heads=32, kv_heads=8, head_dim=128, window=window)
    first = on_gpu(shape, torch.bfloat16, backend)
    spare = 600  # blocks
    cache = torch.full_like(first.cache[:, :1], float("nan")).repeat(1, spare, 1, 1, 1)
    tables = torch.zeros(rows, bound // shape.block_size, dtype=torch.int64, device="cuda")
    static = replace(pad(first, rows=0, max_seq_len=bound), cache=cache)
    batch = replace(static.batch, block_tables=tables, slots=static.batch.slots * 0 - 1, seq_lens_tensor=tables[:, 0] * 0)
    static = replace(static, batch=batch)
    static.run(backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = static.run(backend)
    for seed, lens in enumerate([(5, 4000), (1, 2, 3, 700, 1500, 16, 17, 250), (3000,)]):
        real = on_gpu(replace(shape, sequences=tuple((1, n) for n in lens)), torch.bfloat16, backend, seed)
        count = len(lens)
        cache[:, : real.cache.shape[1]] = real.cache
        tables[:count, : real.batch.block_tables.shape[1]] = real.batch.block_tables
        for target, source, blank in (
            (batch.slots, real.batch.slots, -1),
            (batch.seq_lens_tensor, real.batch.seq_lens_tensor, 0),
            (static.query, real.query, 0),
            (static.key, real.key, 0),
            (static.value, real.value, 0),
        ):
            target.fill_(blank)
            target[:count] = source
        graph.replay()
        assert real.error(got[:count]) < TOLERANCES[torch.bfloat16], lens
        assert got.isfinite().all()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_tokens_do_not_depend_on_batch_or_chunks(dtype: torch.dtype, window: int | None) -> None:
    backend = TritonBackend(deterministic=True)
    shape = Shape(sequences=((700, 700),), heads=32, kv_heads=8, head_dim=128, window=window)
    whole = make_case(shape, dtype, "cuda", seed=4)
    expected = whole.run(backend)
    for cut in (1, 63, 128, 300, 511, 699):
        parts = [part(whole, 0, cut), part(whole, cut, 700)]
        assert torch.equal(torch.cat([p.run(backend) for p in parts]), expected), cut
    for length in (1, 250, 2900):
        other = make_case(replace(shape, sequences=((1, length),)), dtype, "cuda", seed=5)
        assert torch.equal(beside(part(whole, 699, 700), other).run(backend)[:1], expected[699:]), length


def test_the_same_step_twice_gives_the_same_bits() -> None:
    """Pieces are added up in their order, whoever comes last."""
    shape = Shape(sequences=((1, 8000), (1, 3000), (1, 40)), heads=32, kv_heads=8, head_dim=128)
    case = make_case(shape, torch.bfloat16, "cuda")
    expected = case.run(TritonBackend())
    assert all(torch.equal(case.run(TritonBackend()), expected) for _ in range(20))
