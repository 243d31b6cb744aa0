"""Attention by torch's own flash attention over paged KV, ``torch.nn.attention.varlen``. torch 2.13 is the first whose function
takes block tables."""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any, cast

import torch

from torpor.errors import ConfigurationError
from torpor.models.attention.base import AttentionBackend, AttentionLayer, AttentionStep, PagedBatch

_DTYPES = (torch.bfloat16, torch.float16)


class VarlenBackend(AttentionBackend):
    """Contexts are never split, so a result does not depend on which others are in the batch; of chunks torch promises nothing.

    Which head and block sizes run is up to the kernels that torch has for the device; where there are none it raises.
    """

    name = "varlen"
    device_types = ("cuda",)

    def __init__(self, *, deterministic: bool = False) -> None:
        if deterministic:
            raise ConfigurationError(
                "attention_backend 'varlen' cannot be deterministic: torch does not promise that chunks of a prompt give the "
                "same bits as the whole; 'triton' does",
                setting="attention_backend",
                value=self.name,
            )
        super().__init__(deterministic=deterministic)

    @classmethod
    def missing(cls) -> str | None:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:  # torch 2.9 and older
            parameters: Container[str] = ()
        else:
            parameters = inspect.signature(varlen_attn).parameters
        return None if "block_table" in parameters else f"it needs torch 2.13 or newer, this is torch {torch.__version__}"

    def begin(self, batch: PagedBatch, dtype: torch.dtype) -> AttentionStep:
        if dtype not in _DTYPES:
            raise _refuse(f"it computes in bfloat16 and float16, not in {dtype}")
        return _VarlenStep(batch)


class _VarlenStep(AttentionStep):
    def __init__(self, batch: PagedBatch) -> None:
        super().__init__(batch)
        starts = torch.tensor(batch.query_starts, dtype=torch.int32)
        device = batch.block_tables.device
        self._arguments: dict[str, Any] = {
            "cu_seq_q": starts.to(device, non_blocking=True),
            "cu_seq_k": None,
            "max_q": int(starts.diff().max()),
            "max_k": batch.max_seq_len,
            "seqused_k": batch.seq_lens_tensor.to(torch.int32),
            "block_table": batch.block_tables.to(torch.int32),
            "num_splits": 1,
        }

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if layer.softcap is not None:
            raise _refuse("it cannot cap scores, as this model asks")
        window = -1 if layer.sliding_window is None else layer.sliding_window - 1
        attended = varlen_attn(
            query,
            kv_cache[0],
            kv_cache[1],
            **self._arguments,
            scale=layer.scaling,
            window_size=(window, 0),
            enable_gqa=query.shape[1] != kv_cache.shape[3],
        )
        return cast(torch.Tensor, attended)  # a tuple only where more is asked for


def _refuse(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"attention_backend 'varlen' cannot run this model: {reason}", setting="attention_backend", value="varlen"
    )
