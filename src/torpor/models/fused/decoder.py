"""The forward pass of a Llama-like decoder with few kernels, over the parameters of the transformers model it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from torpor.models.attention import AttentionLayer, StepContext
from torpor.models.fused import ops, vector
from torpor.models.fused.invariant import InvariantLinear
from torpor.models.fused.merge import merged

# Whose layers are these and nothing else: a class of another family, or derived from these elsewhere, may do more.
_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class LinearLike(vector.Parameters, Protocol):
    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention: AttentionLayer
    before_attention: torch.Tensor  # weights of the norms
    before_mlp: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    qkv: LinearLike
    out: LinearLike
    gate_up: LinearLike
    down: LinearLike


class FusedDecoder:
    """Computes what the module computes, up to rounding. Holds no tensors of its own.

    ``deterministic``: a token's bytes do not depend on the others of the step, as far as attention sees to that too.
    """

    def __init__(self, module: Any, layers: Sequence[AttentionLayer], *, deterministic: bool = False) -> None:
        config, model = module.config, module.model
        first = model.layers[0].self_attn
        self.head_dim = int(first.head_dim)
        self.q_heads = first.q_proj.out_features // self.head_dim
        self.kv_heads = first.k_proj.out_features // self.head_dim
        self._eps = float(config.rms_norm_eps)
        self._embedding = model.embed_tokens.weight.detach()
        self._norm = model.norm.weight.detach()
        kind = InvariantLinear if deterministic else Linear
        self._deterministic = deterministic
        self._head: LinearLike = kind(*merged([module.lm_head]))
        self._rotary = model.rotary_emb
        self._layers = [_layer(layer, attention, kind) for layer, attention in zip(model.layers, layers, strict=True)]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StepContext,
        rows: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """As ``LoadedModel.forward``. ``layers``: of these alone (None: all), which runs kernels and says nothing."""
        chosen = range(len(self._layers)) if layers is None else layers
        residual = embedding(token_ids, self._embedding)
        cos, sin = (t[0] for t in self._rotary(residual, positions.unsqueeze(0)))
        if len(token_ids) == 1 and ops.use_kernels(residual) and not self._deterministic:
            self._one_token(residual, cos, sin, context, chosen)
            residual = residual if rows is None else residual.index_select(0, rows)
            return self._head(ops.rms_norm(residual, self._norm, self._eps), out)
        hidden: torch.Tensor | None = None
        for index in chosen:
            layer = self._layers[index]
            if hidden is None:
                normed = ops.rms_norm(residual, layer.before_attention, self._eps)
            else:
                normed = ops.add_rms_norm(hidden, residual, layer.before_attention, self._eps)
            attended = self._attend(index, layer, layer.qkv(normed), cos, sin, context)
            normed = ops.add_rms_norm(layer.out(attended), residual, layer.before_mlp, self._eps)
            hidden = layer.down(ops.silu_mul(layer.gate_up(normed)))
        assert hidden is not None
        if rows is not None:  # the last norm and the vocabulary only where somebody looks
            hidden, residual = hidden.index_select(0, rows), residual.index_select(0, rows)
        return self._head(ops.add_rms_norm(hidden, residual, self._norm, self._eps), out)

    @property
    def kinds(self) -> tuple[int, ...]:
        """A layer of each kind of attention, and the second one, whose first norm is of a sum: they run all kernels of a step."""
        first = {layer.attention: index for index, layer in reversed([*enumerate(self._layers)])}
        return tuple(sorted({*first.values(), min(1, len(self._layers) - 1)}))

    def _one_token(
        self, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: StepContext, layers: Sequence[int]
    ) -> None:
        """Layers of a step of one token: residual [1, hidden] becomes what the last norm is of."""
        for index in layers:
            layer = self._layers[index]
            qkv = vector.product(residual, layer.qkv, norm=layer.before_attention, eps=self._eps)
            attended = self._attend(index, layer, qkv, cos, sin, context)
            vector.product(attended, layer.out, residual=residual)
            gated = vector.product(residual, layer.gate_up, norm=layer.before_mlp, eps=self._eps, gated=True)
            vector.product(gated, layer.down, residual=residual)

    def _attend(
        self, index: int, layer: _Layer, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        store = ops.Store(context.kv_caches[index], context.batch.slots) if context.stored_elsewhere else None
        stored = ops.norm_rotate(qkv, cos, sin, self.q_heads, self.kv_heads, layer.head_norms, self._eps, store)
        heads = qkv.view(len(qkv), -1, self.head_dim)
        query, key, value = heads.tensor_split((self.q_heads, self.q_heads + self.kv_heads), dim=1)
        return context.run(index, layer.attention, query, key, value, stored=stored).reshape(len(qkv), -1)


def fuse(module: Any) -> bool:
    """Whether ``module``'s layers are of the kind that FusedDecoder computes. Works on the meta device."""
    name = type(module).__name__
    family = _FAMILIES.get(name)
    if family is None or type(module).__module__ != f"transformers.models.{family}.modeling_{family}":
        return False
    config = module.config
    head_dim = module.model.layers[0].self_attn.head_dim
    return (
        config.hidden_act == "silu"
        and head_dim & (head_dim - 1) == 0
        and 2 * module.model.rotary_emb.inv_freq.numel() == head_dim  # all of a head is rotated
        and len({p.dtype for p in module.parameters()}) == 1
        and all(isinstance(layer.mlp.act_fn, (nn.SiLU, *_silu_types())) for layer in module.model.layers)
    )


def _silu_types() -> tuple[type, ...]:
    from transformers.activations import ACT2FN

    return (type(ACT2FN["silu"]),)


def _layer(layer: Any, attention: AttentionLayer, kind: type[Linear] | type[InvariantLinear]) -> _Layer:
    attn, mlp = layer.self_attn, layer.mlp
    norms = (attn.q_norm.weight.detach(), attn.k_norm.weight.detach()) if hasattr(attn, "q_norm") else None
    return _Layer(
        attention=attention,
        before_attention=layer.input_layernorm.weight.detach(),
        before_mlp=layer.post_attention_layernorm.weight.detach(),
        head_norms=norms,
        qkv=kind(*merged([attn.q_proj, attn.k_proj, attn.v_proj])),
        out=kind(*merged([attn.o_proj])),
        gate_up=kind(*merged([mlp.gate_proj, mlp.up_proj])),
        down=kind(*merged([mlp.down_proj])),
    )
