"""How transformers' models reach torpor's attention: a function in their attention interface, and a probe of what a model asks
of it.

No mask function is registered under this name, so transformers makes no mask; causality and windows are the backend's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from torpor.errors import ModelError
from torpor.models.attention.base import AttentionLayer, StepContext

NAME = "torpor"
CONTEXT = "torpor_step"  # the keyword argument that carries a StepContext or a Probe

# Keyword arguments that change nothing here: positions and caches are ours, other outputs are not asked for.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One layer's call of attention, as the probe saw it."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    layer: AttentionLayer
    refused: tuple[str, ...]  # keyword arguments that would change the result and are not supported


@dataclass(slots=True)
class Probe:
    """Stands in for a StepContext: records each layer's call and returns zeros."""

    calls: list[LayerCall] = field(default_factory=list)


def register() -> None:
    """Make the name known to transformers. Idempotent."""
    AttentionInterface.register(NAME, attention_forward)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, head_dim]
    key: torch.Tensor,  # [1, kv heads, T, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    torpor_step: StepContext | Probe | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """-> ([1, T, heads, head_dim], None), as transformers' own attention functions."""
    index = getattr(module, "layer_idx", None)
    if torpor_step is None or index is None:
        raise ModelError(f"{type(module).__name__} calls attention without its layer's number and what it was given to pass on")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = AttentionLayer(scaling=scale, sliding_window=sliding_window, softcap=softcap)
    if isinstance(torpor_step, Probe):
        others |= {"attention_mask": attention_mask, "dropout": dropout or None}
        torpor_step.calls.append(_record(module, index, layer, query, key, value, others))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    flat = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return torpor_step.run(index, layer, *flat).unsqueeze(0), None


def _record(
    module: torch.nn.Module,
    index: int,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: dict[str, Any],
) -> LayerCall:
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"layer {index} ({type(module).__name__}) gives attention queries {tuple(query.shape)} and keys {tuple(key.shape)}: "
            "only self-attention over the tokens of the step is supported"
        )
    refused = [name for name, given in others.items() if given is not None and name not in _HARMLESS and name != "is_causal"]
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        refused.append("is_causal=False")
    return LayerCall(
        index=index,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=key.shape[3],
        value_dim=value.shape[3],
        layer=layer,
        refused=tuple(refused),
    )
