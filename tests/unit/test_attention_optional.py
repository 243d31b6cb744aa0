"""The backends over other people's kernels, against stand-ins that compute in torch what those document."""

from __future__ import annotations

import sys
import types
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import Shape, make_case, reference

from torpor.errors import ConfigurationError
from torpor.models.attention import get_backend
from torpor.models.attention.flashinfer import FlashInferBackend
from torpor.models.attention.varlen import VarlenBackend

MIXED = ((1, 1), (1, 17), (1, 48), (8, 8), (5, 70), (40, 90))
TOLERANCE = 1e-2  # bfloat16 results of bfloat16 inputs


def of_sequence(
    shape: Shape, query: torch.Tensor, planes: tuple[torch.Tensor, torch.Tensor], blocks: torch.Tensor, length: int
) -> torch.Tensor:
    assert blocks.dtype == torch.int32
    key, value = (plane[blocks.long()].flatten(0, 1)[:length] for plane in planes)
    return reference(shape, query, key, value).to(query.dtype)


# ---- torch's varlen_attn -----------------------------------------------------------------------------------------------------


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    assert seqused_k is not None
    assert block_table is not None
    assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert num_splits == 1
    assert window_size[1] == 0
    heads, head_dim, kv_heads = *query.shape[1:], key.shape[2]
    assert enable_gqa == (heads != kv_heads)
    assert scale == pytest.approx(head_dim**-0.5)
    window = None if window_size[0] < 0 else window_size[0] + 1
    shape = Shape(sequences=(), heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window)
    starts, lens = cu_seq_q.tolist(), seqused_k.tolist()
    assert max_q == max(end - begin for begin, end in pairwise(starts))
    assert max_k >= max(lens)
    out = []
    for row, length in enumerate(lens):
        blocks = block_table[row, : -(-length // key.shape[1])]
        out.append(of_sequence(shape, query[starts[row] : starts[row + 1]], (key, value), blocks, length))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 1, 30])
def test_varlen(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    case = make_case(Shape(sequences=MIXED, window=window), torch.bfloat16, "cpu", cleared=True)
    assert case.error(case.run(get_backend("varlen", "cuda"))) < TOLERANCE


def test_varlen_is_refused_by_a_torch_without_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value: query)
    with pytest.raises(ConfigurationError, match=r"it needs torch 2\.13 or newer, this is torch \d") as caught:
        get_backend("varlen", "cuda")
    assert caught.value.setting == "attention_backend"


def test_varlen_refuses_what_it_cannot_compute() -> None:
    case = make_case(Shape(sequences=MIXED, softcap=2.0), torch.bfloat16, "cpu", cleared=True)
    with pytest.raises(ConfigurationError, match="cannot cap scores"):
        case.run(VarlenBackend())
    with pytest.raises(ConfigurationError, match=r"not in torch\.float32"):
        VarlenBackend().begin(case.batch, torch.float32)
    with pytest.raises(ConfigurationError, match="cannot be deterministic"):
        VarlenBackend(deterministic=True)


# ---- FlashInfer --------------------------------------------------------------------------------------------------------------


class Wrapper:
    """Of paged KV in the layout NHD; ``plan`` says what every ``run`` is about."""

    made = 0
    plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str, **settings: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        assert layout == "NHD"
        type(self).made += 1

    def _plan(
        self,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert {t.dtype for t in (starts, indptr, indices, last_page_len)} == {torch.int32}
        assert q_data_type == kv_data_type == torch.bfloat16
        assert sm_scale == pytest.approx(head_dim**-0.5)
        assert last_page_len.min() >= 1
        assert last_page_len.max() <= page_size
        type(self).plans += 1
        self._shape = Shape(
            sequences=(),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=page_size,
            window=None if window_left < 0 else window_left + 1,
            softcap=logits_soft_cap,
        )
        self._where = starts.tolist(), indptr.tolist(), indices, last_page_len.tolist()

    def run(self, query: torch.Tensor, planes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        starts, indptr, indices, last = self._where
        assert query.shape[0] == starts[-1]
        out = []
        for row, last_len in enumerate(last):
            blocks = indices[indptr[row] : indptr[row + 1]]
            length = (len(blocks) - 1) * self._shape.block_size + last_len
            out.append(of_sequence(self._shape, query[starts[row] : starts[row + 1]], planes, blocks, length))
        return torch.cat(out)


class PrefillWrapper(Wrapper):
    def plan(self, *where: Any, causal: bool, **settings: Any) -> None:
        assert causal
        self._plan(*where, **settings)


class DecodeWrapper(Wrapper):
    def plan(self, indptr: torch.Tensor, *where: Any, **settings: Any) -> None:
        self._plan(torch.arange(len(indptr), dtype=torch.int32), indptr, *where, **settings)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper
    module.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("torpor.models.attention.flashinfer._WORKSPACE_BYTES", 64)
    for kind in (PrefillWrapper, DecodeWrapper):
        kind.made = kind.plans = 0


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 30])
@pytest.mark.parametrize("sequences", [MIXED, MIXED[:3], MIXED[3:]], ids=["mixed", "decodes", "chunks"])
def test_flashinfer(sequences: tuple[tuple[int, int], ...], window: int | None, softcap: float | None) -> None:
    case = make_case(Shape(sequences=sequences, window=window, softcap=softcap), torch.bfloat16, "cpu", cleared=True)
    assert case.error(case.run(FlashInferBackend())) < TOLERANCE


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_plans_once_a_step_and_keeps_its_wrappers() -> None:
    case = make_case(Shape(sequences=MIXED), torch.bfloat16, "cpu", cleared=True)
    backend = FlashInferBackend()
    for _ in range(2):
        step = backend.begin(case.batch, torch.bfloat16)
        step.write_kv(case.key, case.value, case.cache)
        for _ in range(3):
            step.attend(case.shape.layer, case.query, case.key, case.value, case.cache)
    assert (PrefillWrapper.made, PrefillWrapper.plans) == (1, 2)
    assert (DecodeWrapper.made, DecodeWrapper.plans) == (1, 2)


def test_flashinfer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="'flashinfer' cannot run here: install flashinfer-python"):
        get_backend("flashinfer", "cuda")


def test_flashinfer_refuses_what_it_cannot_compute() -> None:
    case = make_case(Shape(sequences=MIXED), torch.float32, "cpu")
    with pytest.raises(ConfigurationError, match=r"not in torch\.float32"):
        FlashInferBackend().begin(case.batch, torch.float32)
    with pytest.raises(ConfigurationError, match="cannot be deterministic"):
        FlashInferBackend(deterministic=True)
