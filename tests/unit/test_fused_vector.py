"""A step of one token: products that norm, gate and add by themselves, and K and V that go to the cache as they are rotated.

The kernels run under Triton's interpreter. On a GPU: tests/gpu/test_gpu_engine.py, through whole models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import Driven, drive, make_worker, prompts, reference_greedy, save_tiny

from torpor.engine.worker import Worker
from torpor.models.attention import AttentionLayer
from torpor.models.attention.triton_backend import TritonBackend
from torpor.models.fused import FusedDecoder, ops, vector
from torpor.models.fused.decoder import Linear

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
EPS = 1e-6


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off, as it is where a GPU is")
    try:
        vector.product(torch.ones(1, 4), Linear(torch.ones(2, 4), None))
    except Exception as error:
        if "0-dimensional arrays" not in str(error):
            raise
        pytest.skip("this Triton's interpreter does not work with this numpy: Triton 3.6 wants numpy below 2.4")
    monkeypatch.setattr(ops, "use_kernels", lambda tensor: True)


@pytest.fixture
def started() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(folder: Path, **settings: Any) -> Worker:
        workers.append(make_worker(folder, **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.shutdown()


# ---- products --------------------------------------------------------------------------------------------------------------

SIZES = pytest.mark.parametrize(
    ("columns", "depth", "tile"),
    [
        (8, 16, vector.Tile(2, 16, 4)),
        (7, 12, vector.Tile(4, 16, 4)),  # neither is covered evenly
        (6, 40, vector.Tile(2, 16, 4)),  # the depth in pieces, the last of them short
        (6, 40, None),
    ],
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@SIZES
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_torchs(columns: int, depth: int, tile: vector.Tile | None, biased: bool) -> None:
    x, linear = drawn(1, depth), Linear(drawn(columns, depth, seed=1), drawn(columns, seed=2) if biased else None)
    torch.testing.assert_close(vector.product(x, linear, tile=tile), linear(x))


@SIZES
def test_a_residual_gets_the_sum_in_place(columns: int, depth: int, tile: vector.Tile | None) -> None:
    x, linear, residual = drawn(1, depth), Linear(drawn(columns, depth, seed=1), None), drawn(1, columns, seed=2)
    expected = residual + linear(x)
    assert vector.product(x, linear, residual=residual, tile=tile) is residual
    torch.testing.assert_close(residual, expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(8, 16), (5, 12)])
def test_the_input_is_normed_and_the_output_gated(columns: int, depth: int, biased: bool) -> None:
    x, norm = drawn(1, depth), drawn(depth, seed=3)
    linear = Linear(drawn(2 * columns, depth, seed=1), drawn(2 * columns, seed=2) if biased else None)
    kept = x.clone()
    expected = ops._rms_norm(x, norm, EPS)
    torch.testing.assert_close(vector.product(x, linear, norm=norm, eps=EPS), linear(expected))
    gate, up = linear(expected).chunk(2, dim=1)
    torch.testing.assert_close(vector.product(x, linear, norm=norm, eps=EPS, gated=True), torch.nn.functional.silu(gate) * up)
    assert torch.equal(x, kept), "the residual before its norm is what the next layer adds to"


def test_rounding_is_that_of_the_separate_kernels() -> None:
    """The normed input is rounded before it is multiplied, the product before it is gated or added. In float16: the interpreter
    cuts bfloat16 off."""
    x, norm, residual, bias = (drawn(1, 64, seed=seed).half() for seed in range(4))
    identity = torch.eye(64, dtype=torch.float16)  # every sum is exact
    assert torch.equal(vector.product(x, Linear(identity, None), norm=norm[0], eps=EPS), ops._rms_norm(x, norm[0], EPS))
    biased = Linear(identity, bias[0] / 7)
    rounded = (x.float() + biased.bias.float()).half()
    assert torch.equal(vector.product(x, biased, residual=residual.clone()), residual + rounded)
    both = Linear(torch.cat([identity, identity]), torch.cat([bias[0] / 7, bias[0] / 7]))
    activated = (rounded.float() / (1 + torch.exp(-rounded.float()))).half()
    assert torch.equal(vector.product(x, both, gated=True), activated * rounded)


def test_a_tile_that_cannot_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="norm"):
        vector.product(drawn(1, 40), Linear(drawn(4, 40), None), norm=drawn(40), tile=vector.Tile(2, 16, 4))


# ---- keys and values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 2), (9, 3), (16, 8)])
@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_go_to_their_slots_as_they_are_rotated(q_heads: int, kv_heads: int, normed: bool) -> None:
    """A token without a slot writes nothing, and slots that nobody was given keep what they had."""
    tokens, head_dim, blocks, block_size = 3, 8, 4, 4
    qkv = drawn(tokens, (q_heads + 2 * kv_heads) * head_dim)
    cos, sin = drawn(tokens, head_dim, seed=1), drawn(tokens, head_dim, seed=2)
    norms = (drawn(head_dim, seed=3), drawn(head_dim, seed=4)) if normed else None
    cache = torch.full((2, blocks, block_size, kv_heads, head_dim), float("nan"))
    slots = torch.tensor([5, -1, 14])
    plain = qkv.clone()
    ops._norm_rotate(plain, cos, sin, q_heads, kv_heads, norms, EPS)
    query, key, value = plain.view(tokens, -1, head_dim).tensor_split((q_heads, q_heads + kv_heads), dim=1)
    assert ops.norm_rotate(qkv, cos, sin, q_heads, kv_heads, norms, EPS, ops.Store(cache, slots))
    torch.testing.assert_close(qkv.view(tokens, -1, head_dim)[:, :q_heads], query)
    flat = cache.view(2, blocks * block_size, kv_heads, head_dim)
    torch.testing.assert_close(flat[0, [5, 14]], key[[0, 2]])
    assert torch.equal(flat[1, [5, 14]], value[[0, 2]])
    others = [slot for slot in range(blocks * block_size) if slot not in (5, 14)]
    assert torch.isnan(flat[:, others]).all()


# ---- whole models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "special", "attention"),
    [("qwen3", {}, "triton"), ("llama", {}, "sdpa"), ("qwen2", {"attention_bias": True}, "triton")],
    ids=["qwen3", "llama", "qwen2"],
)
def test_answers_are_those_of_transformers(
    tmp_path: Path,
    started: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    special: dict[str, Any],
    attention: str,
) -> None:
    """Steps of one token and steps of several, over one cache."""
    monkeypatch.setattr(TritonBackend, "device_types", ("cpu", "cuda"))
    products: list[int] = []
    product = vector.product
    monkeypatch.setattr(vector, "product", lambda *args, **keywords: products.append(1) or product(*args, **keywords))
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = save_tiny(tmp_path, family, num_hidden_layers=2, **small, **special)
    worker = started(tmp_path, fused_layers="on", attention_backend=attention)
    alone = Driven("alone", prompts(5)[0])
    drive(worker, [alone], 3)
    assert len(products) == 4 * 2 * 2, "two steps of one token in two layers"
    together = [Driven(str(index), prompt) for index, prompt in enumerate(prompts(3, 2))]
    drive(worker, together, 3)
    assert alone.output == reference_greedy(model, alone.prompt, 3)
    assert [s.output for s in together] == [reference_greedy(model, s.prompt, 3) for s in together]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_step_of_one_token_computes_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Products of one token add up in another order than those of a token in company."""
    asked: list[int] = []
    product = vector.product
    monkeypatch.setattr(vector, "product", lambda *args, **keywords: asked.append(1) or product(*args, **keywords))
    module = save_tiny(tmp_path, "qwen3", num_hidden_layers=1)
    decoder = FusedDecoder(module, [AttentionLayer(scaling=1.0)], deterministic=deterministic)
    context = SimpleNamespace(stored_elsewhere=False, run=lambda index, layer, query, key, value, stored: query)
    with torch.no_grad():
        decoder.forward(torch.tensor([3]), torch.tensor([0]), context)  # type: ignore[arg-type]
    assert bool(asked) is not deterministic
