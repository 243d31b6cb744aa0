"""Which models can run here: decoder-only, standard attention, found out by asking the model itself.

The model is built without memory (torch's meta device) and run once over two tokens with a probe in place of attention, so that
a model whose attention wants more than the backend gives is refused at load instead of being silently wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from torpor.errors import ModelError
from torpor.models.attention import AttentionLayer, interface
from torpor.models.attention.interface import LayerCall, Probe
from torpor.models.source import ResolvedModel

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_PROBE_TOKENS = 2
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of what a model keeps per token."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[AttentionLayer, ...]  # what each asks of attention


def build_skeleton(resolved: ResolvedModel, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The transformers model on the meta device: every module, no memory. ModelError for models that cannot run here."""
    _check_config(resolved)
    interface.register()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                resolved.hf_config, dtype=dtype, attn_implementation=interface.NAME, trust_remote_code=trust_remote_code
            )
    except KeyError as error:
        raise _refuse(resolved, "its attention does not go through transformers' attention interface") from error
    except Exception as error:  # transformers raises whatever building meets
        raise _refuse(resolved, f"transformers cannot build it as a decoder-only language model: {error}") from error
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise _refuse(resolved, "it counts positions from its padding token's id on, as RoBERTa does, and not from 0")
    return model.eval().requires_grad_(False)


def _check_config(resolved: ResolvedModel) -> None:
    config = resolved.hf_config
    text_config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(resolved, "it is an encoder-decoder model")
    if text_config is not config:
        raise _refuse(resolved, "it is a multi-modal model; its text part alone can run if it is saved as a model of its own")
    for name in _SIZES:
        size = getattr(config, name, 1)
        if isinstance(size, int) and size < 1:
            raise _refuse(resolved, f"{name} is {size} in its config.json")
    if getattr(config, "quantization_config", None) is not None:
        raise _refuse(resolved, "its weights are quantised; unquantised safetensors or GGUF can be loaded")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if odd:
        raise _refuse(resolved, f"it has layers of the type {', '.join(odd)}; only {' and '.join(sorted(_LAYER_TYPES))} run")
    for name in ("attention_chunk_size", "num_kv_shared_layers"):
        if getattr(config, name, None):
            raise _refuse(resolved, f"{name} = {getattr(config, name)} is not supported")


def probe(model: Any, resolved: ResolvedModel) -> Geometry | None:
    """Runs ``model`` with a probe in place of attention. None: on the meta device it needs values it does not have there (a
    mixture of experts that looks at its routing): probe again once the weights are in. ModelError for what attention cannot
    do."""
    device = next(model.parameters()).device
    probe_ = Probe()
    arguments = {
        interface.CONTEXT: probe_,
        "use_cache": False,
        "logits_to_keep": torch.tensor([_PROBE_TOKENS - 1], device=device),
    }
    try:
        with _attributes_kept(model), torch.inference_mode():
            model(
                input_ids=torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=device),
                position_ids=torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0),
                **arguments,
            )
    except ModelError as error:
        raise _refuse(resolved, error.message) from error
    except Exception as error:  # transformers raises whatever a forward pass meets
        if device.type == "meta":
            return None
        raise _refuse(resolved, f"its forward pass does not fit: {type(error).__name__}: {error}") from error
    return _geometry(resolved, probe_.calls)


@contextlib.contextmanager
def _attributes_kept(model: Any) -> Iterator[None]:
    """What a forward pass notes on its modules is forgotten: rotary embeddings of the type longrope keep a tensor there, and one
    from the meta device has no content."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _geometry(resolved: ResolvedModel, calls: list[LayerCall]) -> Geometry:
    problem = next(_problems(resolved.hf_config, calls), None)
    if problem is not None:
        raise _refuse(resolved, problem)
    first = calls[0]
    return Geometry(
        num_layers=len(calls),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        layers=tuple(call.layer for call in sorted(calls, key=lambda call: call.index)),
    )


def _problems(config: Any, calls: list[LayerCall]) -> Iterator[str]:
    expected = getattr(config, "num_hidden_layers", len(calls))
    if sorted(call.index for call in calls) != list(range(expected)) or not calls:
        yield f"{len(calls)} of its {expected} layers use the standard attention interface once each"
    shapes = {(call.heads, call.kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        yield f"its layers differ in heads or head size: {sorted(shapes)}"
    for call in calls:
        if call.refused:
            yield f"layer {call.index} asks attention for {', '.join(call.refused)}, which is not supported"
        if call.value_dim != call.head_dim or call.heads % call.kv_heads:
            yield (
                f"layer {call.index} has {call.heads} heads of {call.head_dim} over {call.kv_heads} KV heads with values of "
                f"{call.value_dim}, which is not standard attention"
            )
        if _should_slide(config, call.index) and call.layer.sliding_window is None:
            yield f"layer {call.index} has a sliding window, but does not tell attention"


def _should_slide(config: Any, index: int) -> bool:
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return bool(layer_types[index] == "sliding_attention")
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _refuse(resolved: ResolvedModel, reason: str) -> ModelError:
    kind = getattr(resolved.hf_config, "model_type", "?")
    return ModelError(f"{resolved.path}: this model ({kind}) is not supported: {reason}", path=str(resolved.path))
