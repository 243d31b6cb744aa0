"""The products for few tokens are torch's own up to rounding, and leave the model's parameters where and what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_worker, save_tiny
from torch import nn

from torpor.models import loader
from torpor.models.linear import FewTokensLinear, use_few_tokens_linear


def linears(width: int, out: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(width, out, bias=bias)
    fast = nn.Linear(width, out, bias=bias)
    fast.load_state_dict(plain.state_dict())
    use_few_tokens_linear(fast)
    assert type(fast) is FewTokensLinear
    return plain, fast


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "out"), [(64, 48), (576, 192), (3000, 16), (64, 2048), (48, 5001)])
def test_equal_to_torch(width: int, out: int, bias: bool) -> None:
    """Both sides of every limit: narrow and wide inputs and outputs, one token and many."""
    plain, fast = linears(width, out, bias)
    with torch.inference_mode():
        for rows in (0, 1, 2, 3, 7, 33):
            for shape in ((1, rows, width), (rows, width)):
                x = torch.randn(shape)
                got = fast(x)
                assert got.is_contiguous()
                torch.testing.assert_close(got, plain(x), rtol=1e-4, atol=1e-5)


def test_a_token_is_computed_alike_twice() -> None:
    _, fast = linears(576, 4096, False)
    x = torch.randn(1, 1, 576)
    with torch.inference_mode():
        assert torch.equal(fast(x), fast(x))


@pytest.mark.parametrize(
    ("amd", "dtype", "used"), [(True, "float32", True), (False, "float32", False), (True, "bfloat16", False)]
)
def test_only_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amd: bool, dtype: str, used: bool) -> None:
    save_tiny(tmp_path)
    monkeypatch.setattr(loader, "is_amd", lambda: amd)
    worker = make_worker(tmp_path, dtype=dtype)
    try:
        kinds = {type(m) for m in worker.model.module.modules() if isinstance(m, nn.Linear)}
        assert kinds == {FewTokensLinear if used else nn.Linear}
    finally:
        worker.shutdown()
