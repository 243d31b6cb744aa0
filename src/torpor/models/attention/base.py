"""The contract of an attention backend: attend over a flattened batch whose keys and values lie in paged blocks.

    tokens of a step   [ d0 | d1 | p2 p2 p2 p2 | p3 p3 ]     T tokens, sequence after sequence, single-token ones first
    query_starts       ( 0,   1,   2,            6,     8 )
    block_tables[2]    [ 7, 3, 9 ]                            position p of sequence 2 lies in block [7, 3, 9][p // block_size]

A backend makes one ``AttentionStep`` per step (masks and index tensors that all layers share) and the model calls it once per
layer: ``write_kv``, then ``attend``.

A step in which every sequence has one token can be captured in a CUDA graph if the backend says ``graphs``. Such a batch may hold
padding rows: ``seq_lens_tensor`` 0, ``slots`` -1, any block table. Nothing is written for them and their output is finite.
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
    """Where the tokens of one step lie. Tensors are int64 on the model's device; sequences with one token come first.

    For a captured step the tuples describe the capture and not the replays: ``seq_lens`` then holds anything up to
    ``max_seq_len``, and only the tensors, at the addresses they were captured at, say what a replay does.
    """

    block_size: int
    query_starts: tuple[int, ...]  # S + 1 entries
    seq_lens: tuple[int, ...]  # S entries: tokens in the cache once this step's are written
    max_seq_len: int  # no seq_len exceeds it, in a captured step in no replay
    num_single: int  # how many of the S sequences have one token in this step
    slots: torch.Tensor  # [T]: block * block_size + offset, where each token's K and V go
    fresh_blocks: torch.Tensor  # [F]: blocks whose first slot is among them; empty if the backend does not say clears_blocks
    block_tables: torch.Tensor  # [S, max blocks]; entries beyond a sequence's length are undefined
    seq_lens_tensor: torch.Tensor  # [S]: seq_lens


class AttentionStep(abc.ABC):
    """One step's plan. ``write_kv`` and ``attend`` are called once per layer, layers in any order, by one thread, on the stream
    that is current."""

    stored_elsewhere: ClassVar[bool] = False
    """Whoever computes keys and values may store them at the batch's slots itself and leave ``write_kv`` out: it does nothing
    else, and ``attend`` reads the cache alone."""

    def __init__(self, batch: PagedBatch) -> None:
        self.batch = batch

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store key and value [T, kv heads, head_dim] at the batch's slots of kv_cache [2, blocks, block_size, kv heads,
        head_dim]."""
        write_kv(kv_cache, key, value, self.batch)

    @abc.abstractmethod
    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """query [T, heads, head_dim], key and value [T, kv heads, head_dim], already written to kv_cache -> [T, heads,
        head_dim]."""


class AttentionBackend(abc.ABC):
    """``deterministic``: what a sequence's tokens attend to depends bit for bit on that sequence alone, whatever else is in the
    batch and however its prompt was cut into chunks. ConfigurationError if the backend cannot promise it."""

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...]] = ()  # empty: any

    graphs: ClassVar[bool] = False
    """A step of single tokens can be captured in a CUDA graph and replayed: ``begin``, ``write_kv`` and ``attend`` wait for
    nothing, read nothing but the batch's tensors, shapes, ``block_size`` and ``max_seq_len``, and allocate by shapes alone.
    ``begin`` is part of what is captured."""

    clears_blocks: ClassVar[bool] = True
    """``write_kv`` clears ``fresh_blocks``, because the kernels multiply masked positions by zero and a NaN that an earlier owner
    left would poison that. False: masked positions are never read, and ``fresh_blocks`` is not looked at."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed, or is too old, for this backend to run here; None if it can. Cheap; never raises."""
        return None

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

    @property
    def stored_elsewhere(self) -> bool:
        """K and V may be in the cache before ``run`` is called: no connector is still about to load something there."""
        return self.events is None and self.step.stored_elsewhere

    def run(
        self,
        index: int,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        stored: bool = False,
    ) -> torch.Tensor:
        """Write this step's K and V of layer ``index``, unless they are ``stored``, then attend. Shapes as in
        ``AttentionStep.attend``."""
        cache = self.kv_caches[index]
        if self.events is not None:
            self.events.wait_for_layer_load(self.layer_names[index])
        if not stored:
            self.step.write_kv(key, value, cache)
        attended = self.step.attend(layer, query, key, value, cache)
        if self.events is not None:
            self.events.save_kv_layer(self.layer_names[index], cache)
        return attended


def write_kv(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
    """Store key and value [T, kv heads, head_dim] at their slots, on any device, and clear the whole of ``fresh_blocks``: see
    ``AttentionBackend.clears_blocks``."""
    if batch.fresh_blocks.numel():
        kv_cache.index_fill_(1, batch.fresh_blocks, 0)
    flat = kv_cache.view(2, -1, *kv_cache.shape[3:])
    flat[0].index_copy_(0, batch.slots, key)
    flat[1].index_copy_(0, batch.slots, value)
