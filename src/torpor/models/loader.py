"""Loading: every parameter and buffer of a transformers model gets its memory from a pool and its values from a weight source.

``weights`` holds parameters and persistent buffers: what a reload from the source restores. ``runtime`` holds the other buffers
(rotary frequencies and the like), which the model computes from its configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torpor.errors import ConfigurationError, ModelError
from torpor.kvcache.types import KVCacheSpec
from torpor.models.architecture import Geometry, build_skeleton, probe
from torpor.models.attention import AttentionBackend, StepContext, get_backend, interface
from torpor.models.checkpoint import check_size
from torpor.models.config import ModelConfig
from torpor.models.dtypes import choose_dtype, dtype_name
from torpor.models.fused import FusedDecoder, fuse, merged_names
from torpor.models.hardware import is_amd
from torpor.models.linear import use_few_tokens_linear
from torpor.models.placement import compute_buffers, place_tensors, weight_bytes
from torpor.models.source import ResolvedModel
from torpor.models.weights import WeightSource, check_tied, choose_source, missing_tensors

if TYPE_CHECKING:
    from torpor.memory import Memory, Staging

WEIGHTS_TAG = "weights"
RUNTIME_TAG = "runtime"


class LoadedModel:
    """A model whose every tensor lies in a pool. Made by ``load_model``; for one thread at a time."""

    def __init__(
        self,
        resolved: ResolvedModel,
        module: Any,
        source: WeightSource,
        weights: dict[str, torch.Tensor],
        geometry: Geometry,
        backend: AttentionBackend,
        fused: FusedDecoder | None = None,
    ) -> None:
        self.resolved = resolved
        self.module = module  # the transformers model
        self.geometry = geometry
        self.backend = backend
        self.fused = fused  # computes instead of the module where there is one
        self.layer_names = tuple(f"layers.{i}" for i in range(geometry.num_layers))
        self._source = source
        self._weights = weights

    @property
    def device(self) -> torch.device:
        return next(iter(self._weights.values())).device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.module.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        return int(self.resolved.hf_config.vocab_size)

    @property
    def weight_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._weights.values())

    def reload_weights(self) -> None:
        """Write all weights again from the source, into the same tensors (level 2). ModelError if the source changed or is
        damaged: the weights' content is undefined then, and the call can be repeated."""
        with torch.no_grad():
            self._source.fill(self._weights)

    def check_weights(self, resolved: ResolvedModel) -> None:
        """ModelError for a checkpoint from ``resolve_update`` that lacks tensors of the present one, or unties tied ones."""
        present, other = self.resolved.checkpoint, resolved.checkpoint
        if present is None or other is None:
            return
        state = self.module.state_dict()
        missing = missing_tensors(present, other, state)
        if missing:
            path = str(resolved.path)
            text = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ModelError(f"{path}: the weights do not fit the model: missing, or of another shape: {text}", path=path)
        check_tied(other, state, str(resolved.path))

    def use_weights(self, resolved: ResolvedModel) -> None:
        """The next ``reload_weights`` reads this checkpoint, which ``resolve_update`` found fit."""
        self._source = choose_source(resolved, self.module, self._weights)
        self.resolved = resolved

    def reset_buffers(self) -> None:
        """Compute the buffers in ``runtime`` again, in place: after a sleep that discarded them."""
        with torch.no_grad():
            compute_buffers(self.module)

    def kv_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        return KVCacheSpec(
            model_id=self.resolved.model_id,
            num_layers=self.geometry.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.geometry.num_kv_heads,
            head_dim=self.geometry.head_dim,
            dtype=dtype_name(self.dtype),
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StepContext,
        rows: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids and positions [T] int64, rows [R] of them (None: all) -> logits [R, vocabulary] in the model's dtype, into
        ``out`` where given. Writes the KV cache."""
        if self.fused is not None:
            return self.fused.forward(token_ids, positions, context, rows, out)
        output = self.module(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            **{interface.CONTEXT: context},
        )
        logits: torch.Tensor = output.logits[0]
        return logits if out is None else out.copy_(logits)


def load_model(resolved: ResolvedModel, config: ModelConfig, memory: Memory, *, through_images: bool = False) -> LoadedModel:
    """Build the model, give every tensor its place in pool ``weights`` or ``runtime``, and fill it. ``through_images``: weights
    that are read from files go to the device by way of their host images, so that the first sleep finds those made.

    Blocks while it reads. ModelError for models that cannot run here and for files that do not fit; DeviceMemoryError when the
    pools cannot grow.
    """
    weights_pool, runtime_pool = memory.pool(WEIGHTS_TAG, policy="host"), memory.pool(RUNTIME_TAG, policy="host")
    device_type = "cpu" if memory.device.driver == "host" else memory.device.driver
    backend = get_backend(config.attention_backend, device_type, deterministic=config.deterministic)
    dtype = choose_dtype(config.dtype, _stored_dtype(resolved), on_cpu=device_type == "cpu")
    module = build_skeleton(resolved, dtype, config.trust_remote_code)
    fused = _fuses(config.fused_layers, module, device_type)
    if config.deterministic and not (fused and device_type == "cuda"):
        raise ConfigurationError(
            "deterministic needs a GPU and a model whose layers are fused (Llama, Mistral, Qwen2, Qwen3)",
            setting="deterministic",
            value=True,
        )
    if device_type == "cpu" and dtype == torch.float32 and is_amd() and not fused:
        use_few_tokens_linear(module)
    if resolved.checkpoint is not None:
        check_size(module, resolved.checkpoint.num_elements, resolved.path / "config.json")
    geometry = probe(module, resolved)
    with torch.no_grad():
        if through_images:
            memory.take_ahead(weight_bytes(module))
        weights = place_tensors(module, dtype, weights_pool, runtime_pool, merged_names(module) if fused else ())
        if resolved.checkpoint is not None:
            check_tied(resolved.checkpoint, module.state_dict(), str(resolved.path))
        source = choose_source(resolved, module, weights)
        compute_buffers(module)
        _fill(source, weights, memory if through_images and source.from_files else None)
    geometry = geometry or probe(module, resolved)
    if geometry is None:
        raise ModelError(f"{resolved.path}: the model's attention could not be probed", path=str(resolved.path))
    decoder = FusedDecoder(module, geometry.layers, deterministic=config.deterministic) if fused else None
    return LoadedModel(resolved, module, source, weights, geometry, backend, decoder)


def _fill(source: WeightSource, weights: dict[str, torch.Tensor], images: Memory | None) -> None:
    if images is None:
        source.fill(weights)
        return
    with images.load_in_steps(list(weights.values())) as staging:
        source.fill(dict(zip(weights, staging.tensors, strict=True)), _StagingSteps(list(weights), staging))


class _StagingSteps:
    """The filling of a memory's staging, by names."""

    def __init__(self, names: list[str], staging: Staging) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._staging = staging

    def before(self, name: str) -> None:
        self._staging.ready(self._index[name])

    def after(self, name: str) -> None:
        self._staging.written(self._index[name])


def _fuses(setting: str, module: Any, device_type: str) -> bool:
    """``auto`` is on a GPU, for the models that have such layers."""
    wanted = device_type == "cuda" if setting == "auto" else setting == "on"
    return wanted and fuse(module)


def _stored_dtype(resolved: ResolvedModel) -> torch.dtype:
    if resolved.checkpoint is not None:
        return resolved.checkpoint.dtype
    configured = getattr(resolved.hf_config, "dtype", None)
    return configured if isinstance(configured, torch.dtype) else torch.float32
