"""The contract of an attention backend: attend over a flattened batch whose keys and values lie in paged blocks.

    tokens of a step   [ d0 | d1 | p2 p2 p2 p2 | p3 p3 ]     T tokens, sequence after sequence, single-token ones first
    query_starts       ( 0,   1,   2,            6,     8 )
    block_tables[2]    [ 7, 3, 9 ]                            position p of sequence 2 lies in block [7, 3, 9][p // block_size]

A backend makes one ``AttentionStep`` per step (masks and index tensors that all layers share) and the model calls it once per
layer.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What a layer asks of attention, beyond causal and per sequence."""

    scaling: float
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the tokens of one step lie. Tensors are int64 on the model's device; sequences with one token come first."""

    block_size: int
    query_starts: tuple[int, ...]  # S + 1 entries
    seq_lens: tuple[int, ...]  # S entries: tokens in the cache once this step's are written
    num_single: int  # how many of the S sequences have one token in this step
    slots: torch.Tensor  # [T]: block * block_size + offset, where each token's K and V go
    fresh_blocks: torch.Tensor  # [F]: blocks whose first slot is among them
    block_tables: torch.Tensor  # [S, max blocks]; entries beyond a sequence's length are undefined
    seq_lens_tensor: torch.Tensor  # [S]: seq_lens


class AttentionStep(abc.ABC):
    """One step's plan. ``attend`` is called once per layer, in any order, by one thread."""

    @abc.abstractmethod
    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """query [T, heads, head_dim], key and value [T, kv heads, head_dim], already written to kv_cache -> [T, heads,
        head_dim]."""


class AttentionBackend(abc.ABC):
    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...]] = ()  # empty: any

    @abc.abstractmethod
    def begin(self, batch: PagedBatch, dtype: torch.dtype) -> AttentionStep: ...


class LayerEvents(Protocol):
    """Told around every layer's attention: what connectors that load or push layer by layer hang on to."""

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What travels through the model to its attention layers, as one keyword argument."""

    batch: PagedBatch
    step: AttentionStep
    kv_caches: Sequence[torch.Tensor]  # per layer [2, blocks, block_size, kv heads, head_dim]
    layer_names: Sequence[str] = ()
    events: LayerEvents | None = None

    def run(self, index: int, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write this step's K and V of layer ``index``, then attend. Shapes as in ``AttentionStep.attend``."""
        cache = self.kv_caches[index]
        if self.events is not None:
            self.events.wait_for_layer_load(self.layer_names[index])
        write_kv(cache, key, value, self.batch)
        attended = self.step.attend(layer, query, key, value, cache)
        if self.events is not None:
            self.events.save_kv_layer(self.layer_names[index], cache)
        return attended


def write_kv(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
    """Store key and value [T, kv heads, head_dim] at their slots.

    A block's first token clears the whole block: kernels multiply masked positions by zero, so a NaN that an earlier
    owner left behind would poison the sequence that got the block next.
    """
    if batch.fresh_blocks.numel():
        kv_cache.index_fill_(1, batch.fresh_blocks, 0)
    flat = kv_cache.view(2, -1, *kv_cache.shape[3:])
    flat[0].index_copy_(0, batch.slots, key)
    flat[1].index_copy_(0, batch.slots, value)
