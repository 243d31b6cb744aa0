"""Attention by torpor's own Triton kernels, which read K and V where they lie."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from torpor.models.attention.base import AttentionBackend, AttentionLayer, AttentionStep, PagedBatch

_CPU_PROCESSORS = 4  # under Triton's interpreter: any number


class TritonBackend(AttentionBackend):
    """Steps of single tokens cut long contexts into pieces, so that one sequence fills the device as many do.

    ``deterministic``: every token goes through the kernel for chunks, whose tiles of keys begin at multiples of one constant and
    are added up in order. A token's result is then the same bits in a prompt, in any chunk of it and as a decoded token. It costs
    the pieces: a step of few sequences with long contexts reads them with few multiprocessors.
    """

    name = "triton"
    device_types = ("cuda",)
    graphs = True
    clears_blocks = False

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("triton") else "install triton, which torch for CUDA comes with"

    def begin(self, batch: PagedBatch, dtype: torch.dtype) -> AttentionStep:
        return _TritonStep(batch, self.deterministic)


class _TritonStep(AttentionStep):
    """Plans and room for partial sums are made at a layer's first call and shared by the layers alike."""

    stored_elsewhere = True

    def __init__(self, batch: PagedBatch, deterministic: bool) -> None:
        super().__init__(batch)
        self._deterministic = deterministic
        self._made: dict[Any, Any] = {}

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        from torpor.models.attention.triton_kernels.write import write_kv

        write_kv(kv_cache, key, value, self.batch.slots)

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        singles, count = self.batch.num_single, len(self.batch.seq_lens)
        if self._deterministic:
            self._attend_chunks(layer, query, kv_cache, out, range(count))
            return out
        if singles:
            self._attend_singles(layer, query[:singles], kv_cache, out[:singles])
        if singles < count:
            self._attend_chunks(layer, query, kv_cache, out, range(singles, count))
        return out

    def _attend_singles(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        from torpor.models.attention.triton_kernels import decode, plan, tuning

        count, heads, head_dim = query.shape
        kv_heads, window = kv_cache.shape[3], layer.sliding_window
        processors = _processors(query.device)
        tiles = tuning.decode_tiles(query.dtype, head_dim, crowded=count * kv_heads > 2 * processors)
        made = self._made.get(("plan", window, heads, kv_heads, head_dim))
        if made is None:
            cut = plan.make_plan(
                self.batch.seq_lens_tensor[:count],
                kv_heads,
                max_seq_len=self.batch.max_seq_len,
                window=window,
                target=max(1, tiles.waves * processors // kv_heads),
                shortest=tiles.shortest,
                multiple=tiles.block_n,
            )
            made = self._made["plan", window, heads, kv_heads, head_dim] = (cut, decode.partial_sums(cut, heads, head_dim))
        decode.decode(
            query,
            out,
            kv_cache,
            self.batch.block_tables,
            *made,
            scaling=layer.scaling,
            softcap=layer.softcap,
            tiles=tiles,
        )

    def _attend_chunks(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, rows: range
    ) -> None:
        from torpor.models.attention.triton_kernels import prefill, tuning

        tiles = tuning.prefill_tiles(query.dtype, query.shape[-1])
        tokens = tiles.tokens(query.shape[1] // kv_cache.shape[3])
        where = self._made.get(("tiles", tokens))
        if where is None:
            where = self._made["tiles", tokens] = self._query_tiles(rows, tokens)
        prefill.prefill(
            query,
            out,
            kv_cache,
            self.batch.block_tables,
            where,
            scaling=layer.scaling,
            softcap=layer.softcap,
            window=layer.sliding_window,
            tiles=tiles,
            deterministic=self._deterministic,
        )

    def _query_tiles(self, rows: range, tokens: int) -> torch.Tensor:
        from torpor.models.attention.triton_kernels import prefill

        batch = self.batch
        if batch.num_single == len(batch.seq_lens):  # a step that may be captured: only its tensors count
            return prefill.single_tiles(batch.seq_lens_tensor)
        return prefill.tiles_of(batch.query_starts, batch.seq_lens, rows, tokens, batch.seq_lens_tensor.device)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _CPU_PROCESSORS
