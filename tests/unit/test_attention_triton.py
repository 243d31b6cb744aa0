"""The Triton kernels under Triton's interpreter, in this machine's memory. On a GPU: tests/gpu/test_gpu_attention.py."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from attention_cases import TOLERANCES, Shape, beside, make_case, pad, part, random_shape

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
