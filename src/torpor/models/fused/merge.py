"""Parameters that lie one after another in their pool, so that several products are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ATTENTION = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj")


def merged_names(module: Any) -> list[tuple[str, ...]]:
    """Names of parameters, in groups: each group is wanted as one tensor, row after row."""
    groups: list[tuple[str, ...]] = []
    for index, layer in enumerate(module.model.layers):
        for owner, leaves in (("self_attn", _ATTENTION), ("mlp", _MLP)):
            for kind in ("weight", "bias"):
                names = [f"model.layers.{index}.{owner}.{leaf}.{kind}" for leaf in leaves]
                present = [getattr(getattr(getattr(layer, owner), leaf), kind) is not None for leaf in leaves]
                if all(present):
                    groups.append(tuple(names))
    return groups


def merged(linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [sum of rows, in] and bias of several linear layers as one; views where they lie together, else copies.

    Copies would be a second set of weights that no pool knows: only tests, with models of no pool, get them.
    """
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return _joined(weights), _joined(biases) if biases else None


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        end += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())
