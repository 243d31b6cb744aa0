"""Moving a skeleton's parameters and buffers from the meta device into pools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torpor.errors import ModelError
from torpor.models.weights import initialise, protected

if TYPE_CHECKING:
    from torpor.memory import Pool

_ALIGN_BYTES = 256  # of tensors in pools


def place_tensors(
    model: Any, dtype: torch.dtype, weights: Pool, runtime: Pool, merged: Sequence[tuple[str, ...]] = ()
) -> dict[str, torch.Tensor]:
    """Give every parameter and buffer of ``model`` its memory; content is undefined. Tensors that were one stay one (tied
    weights). Parameters of one group in ``merged`` lie one after another, as the rows of one tensor.

    Returns what a weight source has to fill, by its first name in the state dict.
    """
    in_float32 = _float32_pattern(model, dtype)
    weights.reserve(weight_bytes(model))
    placed = _place_merged(model, weights, merged)
    to_fill: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for name, module, leaf, parameter in _parameters(model):
        tensor = placed.get(id(parameter))
        if tensor is None:
            kind = torch.float32 if in_float32 is not None and in_float32.search(name) else parameter.dtype
            tensor = placed[id(parameter)] = nn.Parameter(weights.empty(parameter.shape, kind), requires_grad=False)
        if isinstance(tensor, nn.Parameter) and id(tensor) not in known:
            known.add(id(tensor))
            to_fill[name] = tensor.data
        module._parameters[leaf] = tensor
    for name, module, leaf, buffer in _buffers(model):
        persistent = leaf not in module._non_persistent_buffers_set
        tensor = placed.get(id(buffer))
        if tensor is None:
            tensor = placed[id(buffer)] = (weights if persistent else runtime).empty(buffer.shape, buffer.dtype)
            if persistent:
                to_fill[name] = tensor
        module._buffers[leaf] = tensor
    return to_fill


def _place_merged(model: Any, weights: Pool, groups: Sequence[tuple[str, ...]]) -> dict[int, Any]:
    """By the id of the parameter that it stands for."""
    parameters = dict(model.named_parameters(remove_duplicate=False)) if groups else {}
    placed: dict[int, Any] = {}
    for group in groups:
        parts = [parameters[name] for name in group]
        rows = [len(part) for part in parts]
        whole = weights.empty((sum(rows), *parts[0].shape[1:]), parts[0].dtype)
        for part, place in zip(parts, torch.split(whole, rows), strict=True):
            placed[id(part)] = nn.Parameter(place, requires_grad=False)
    return placed


def compute_buffers(model: Any) -> None:
    """Fill the buffers that no checkpoint holds, in place, by the model's own initialisation. ModelError if that leaves any
    untouched."""
    found = [(module, buffer) for _, module, leaf, buffer in _buffers(model) if leaf in module._non_persistent_buffers_set]
    buffers = [buffer for _, buffer in found]
    owners = {id(module): module for module, _ in found}.values()
    with protected(model.state_dict(keep_vars=True).values()):
        outcomes = []
        for before in (0, 1):  # what is not written keeps what was there before, and gives itself away
            for buffer in buffers:
                buffer.fill_(before)
            initialise(model, owners)
            outcomes.append([buffer.clone() for buffer in buffers])
    if not all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True)):
        raise ModelError(
            f"{type(model).__name__} has buffers that are neither among its weights nor computed by its initialisation"
        )


def weight_bytes(model: Any) -> int:
    """One region for all of them: it sleeps and wakes faster than many."""
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
    return sum(-(-t.numel() * t.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES for t in tensors)


def _parameters(model: Any) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf, parameter


def _buffers(model: Any) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf, buffer


def _float32_pattern(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Names that the model wants in float32 whatever its dtype."""
    plan: dict[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda _: {})(dtype)
    return re.compile("|".join(key.replace("*", r"[^.]*") for key in plan)) if plan else None
