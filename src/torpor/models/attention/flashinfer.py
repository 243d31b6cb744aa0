"""Attention by FlashInfer's wrappers for paged KV, written against flashinfer-python 0.7.4.

A wrapper is planned on the host for one kind of layer and one batch. Its buffers are worth keeping, so a backend has one wrapper
per kind of layer and plans it when a step's first layer of that kind attends.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torpor.errors import ConfigurationError
from torpor.models.attention.base import AttentionBackend, AttentionLayer, AttentionStep, PagedBatch

_DTYPES = (torch.bfloat16, torch.float16)
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends


class FlashInferBackend(AttentionBackend):
    name = "flashinfer"
    device_types = ("cuda",)

    def __init__(self, *, deterministic: bool = False) -> None:
        if deterministic:
            raise ConfigurationError(
                "attention_backend 'flashinfer' cannot be deterministic: it splits contexts by what else is in the batch; "
                "'triton' can",
                setting="attention_backend",
                value=self.name,
            )
        super().__init__(deterministic=deterministic)
        self._wrappers: dict[Any, Any] = {}
        self._workspace: torch.Tensor | None = None

    @classmethod
    def missing(cls) -> str | None:
        return (
            None if importlib.util.find_spec("flashinfer") else "install flashinfer-python, which needs nvcc to compile kernels"
        )

    def begin(self, batch: PagedBatch, dtype: torch.dtype) -> AttentionStep:
        if dtype not in _DTYPES:
            raise ConfigurationError(
                f"attention_backend 'flashinfer' computes in bfloat16 and float16, not in {dtype}",
                setting="attention_backend",
                value=self.name,
            )
        return _FlashInferStep(self, batch)

    def wrapper(self, kind: str, key: Any, device: torch.device) -> Any:
        """``kind``: "decode" or "prefill"; ``key``: what it is planned for."""
        found = self._wrappers.get((kind, key))
        if found is None:
            flashinfer = importlib.import_module("flashinfer")
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            if kind == "decode":
                # Its other kernels know few ratios of heads.
                found = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
            else:
                found = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[kind, key] = found
        return found


@dataclass(frozen=True, slots=True)
class _Part:
    """The single-token sequences of a batch, or the others."""

    kind: str
    tokens: slice
    starts: torch.Tensor  # [N + 1] int32 on the host: first token of each, from the part's own
    first_blocks: torch.Tensor  # [N + 1] int32 on the host: where each one's blocks begin in ``blocks``
    last_lens: torch.Tensor  # [N] int32 on the host: tokens in the last block
    blocks: torch.Tensor  # [B] int32 on the device


class _FlashInferStep(AttentionStep):
    def __init__(self, backend: FlashInferBackend, batch: PagedBatch) -> None:
        super().__init__(batch)
        self._backend = backend
        singles, count = batch.num_single, len(batch.seq_lens)
        spans = (("decode", range(singles)), ("prefill", range(singles, count)))
        self._parts = [self._part(kind, rows) for kind, rows in spans if len(rows)]
        self._planned: dict[Any, list[Any]] = {}

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        asked = (layer, query.dtype, *query.shape[1:], kv_cache.shape[3])
        wrappers = self._planned.get(asked)
        if wrappers is None:
            wrappers = self._planned[asked] = [self._plan(part, asked) for part in self._parts]
        planes = (kv_cache[0], kv_cache[1])
        attended = [wrapper.run(query[part.tokens], planes) for part, wrapper in zip(self._parts, wrappers, strict=True)]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _part(self, kind: str, rows: range) -> _Part:
        batch = self.batch
        starts = torch.tensor(batch.query_starts[rows.start : rows.stop + 1], dtype=torch.int32)
        lens = torch.tensor(batch.seq_lens[rows.start : rows.stop], dtype=torch.int32)
        counts = (lens + batch.block_size - 1) // batch.block_size
        return _Part(
            kind=kind,
            tokens=slice(int(starts[0]), int(starts[-1])),
            starts=starts - starts[0],
            first_blocks=torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
            last_lens=lens - (counts - 1) * batch.block_size,
            blocks=self._blocks(rows, counts),
        )

    def _blocks(self, rows: Sequence[int], counts: torch.Tensor) -> torch.Tensor:
        tables = self.batch.block_tables
        row = torch.repeat_interleave(torch.tensor(rows), counts)
        column = torch.cat([torch.arange(int(count)) for count in counts])
        index = (row * tables.shape[1] + column).to(tables.device, non_blocking=True)
        return tables.reshape(-1).index_select(0, index).to(torch.int32)

    def _plan(self, part: _Part, asked: tuple[Any, ...]) -> Any:
        layer, dtype, heads, head_dim, kv_heads = asked
        wrapper = self._backend.wrapper(part.kind, asked, part.blocks.device)
        shape = (heads, kv_heads, head_dim, self.batch.block_size)
        settings = {
            "sm_scale": layer.scaling,
            "window_left": -1 if layer.sliding_window is None else layer.sliding_window - 1,
            "logits_soft_cap": layer.softcap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        where = (part.first_blocks, part.blocks, part.last_lens)
        if part.kind == "decode":
            wrapper.plan(*where, *shape, **settings)
        else:
            wrapper.plan(part.starts, *where, *shape, causal=True, **settings)
        return wrapper
