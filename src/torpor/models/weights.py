"""Where weights come from, and how they get into tensors that already exist.

A source fills the same tensors again and again: at load, and by the wake that follows a level-2 sleep.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from torpor.errors import ModelError
from torpor.models.checkpoint import Checkpoint
from torpor.models.checkpoint_files import hash_files, sign_files
from torpor.models.fill_steps import NO_STEPS, FillSteps
from torpor.models.quiet import quiet_transformers
from torpor.models.source import ResolvedModel

_RANDOM_SEED = 0
_RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # older checkpoints carry these buffers; the model computes them


class WeightSource(Protocol):
    from_files: bool  # what it reads passes through host memory

    def fill(self, targets: Mapping[str, torch.Tensor], steps: FillSteps = NO_STEPS) -> None:
        """Write every target, in place. Keys are names of the model's state dict; tied tensors appear once. ModelError when one
        cannot be filled, or when the source is not what it was when the model was resolved."""


def choose_source(resolved: ResolvedModel, model: Any, names: Iterable[str]) -> WeightSource:
    """``names``: what there is to fill. Straight reads if the files hold exactly the model's tensors, else transformers
    converts."""
    checkpoint = resolved.checkpoint
    if checkpoint is None:
        return RandomWeights(model)
    state = model.state_dict()
    stored = {name: entry.shape for name, entry in checkpoint.entries.items() if not _RECOMPUTED.search(name)}
    # A stored name beyond those to fill is a second copy of a tied tensor. Any other is transformers' to convert or to report.
    if stored.keys() <= state.keys() and all(stored.get(name) == tuple(state[name].shape) for name in names):
        return CheckpointWeights(resolved, checkpoint)
    return ConvertedWeights(resolved, checkpoint, model)


def missing_tensors(present: Checkpoint, other: Checkpoint, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors of the model (``state``: its state dict) that were read from ``present`` and cannot be from ``other``, which has no
    names of its own for them: it is the same files with something left out, or of another shape. A tied tensor needs one name."""
    if other.entries.keys() - present.entries.keys():
        return []  # laid out in another way: transformers finds out
    held = {name for name, entry in other.entries.items() if entry.shape == present.entries[name].shape}
    filled = {state[name].data_ptr() for name in held if name in state}
    return sorted(
        name
        for name in present.entries.keys() - held
        if name in state and (name in other.entries or state[name].data_ptr() not in filled)
    )


def check_tied(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor], folder: str) -> None:
    """ModelError when the files hold two different tensors where the model (``state``: its state dict) has one: whichever was
    taken, the answers would be another model's. Reads what is stored twice."""
    first: dict[int, str] = {}
    for name in (name for name, tensor in state.items() if name in checkpoint.entries and tensor.numel()):
        other = first.setdefault(state[name].data_ptr(), name)
        if other != name and not checkpoint.same_values(other, name, state[name].dtype):
            raise _untied(folder, name, other)


def _untied(folder: str, name: str, other: str) -> ModelError:
    return ModelError(
        f"{folder}: by its configuration {name} is {other}, but the weights hold two that differ: "
        "config.json is to say tie_word_embeddings: false",
        path=folder,
    )


class CheckpointWeights:
    """Safetensors whose tensors are the model's own: read straight into place."""

    from_files = True

    def __init__(self, resolved: ResolvedModel, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._unchanged = _Unchanged(resolved, checkpoint)

    def fill(self, targets: Mapping[str, torch.Tensor], steps: FillSteps = NO_STEPS) -> None:
        self._unchanged.check()
        self._checkpoint.read_into(targets, steps)


class ConvertedWeights:
    """Safetensors that transformers renames, splits or merges on the way: loaded whole into host memory, then copied."""

    from_files = True

    def __init__(self, resolved: ResolvedModel, checkpoint: Checkpoint, model: Any) -> None:
        self._resolved = resolved
        self._unchanged = _Unchanged(resolved, checkpoint)
        self._class = type(model)
        self._dtype = model.dtype

    def fill(self, targets: Mapping[str, torch.Tensor], steps: FillSteps = NO_STEPS) -> None:
        self._unchanged.check()
        state = self._load()
        ties = {state[name].data_ptr(): name for name in targets}
        untied = next((name for name in state.keys() - targets.keys() if state[name].data_ptr() not in ties), None)
        if untied is not None:
            raise _untied(str(self._resolved.path), untied, "tied to another tensor")
        for name, target in targets.items():
            steps.before(name)
            target.copy_(state.pop(name))
            steps.after(name)

    def _load(self) -> dict[str, torch.Tensor]:
        path = str(self._resolved.path)
        try:
            with quiet_transformers():
                model, info = self._class.from_pretrained(
                    path,
                    config=copy.deepcopy(self._resolved.hf_config),
                    dtype=self._dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # they come back in the report, by name
                    output_loading_info=True,
                )
        except Exception as error:  # transformers raises whatever loading meets
            raise ModelError(f"{path}: transformers cannot load these weights: {error}", path=path) from error
        problems = {kind: sorted(map(str, keys))[:5] for kind, keys in info.items() if keys}
        if problems:
            text = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(keys)}" for kind, keys in problems.items())
            raise ModelError(f"{path}: the weights do not fit the configuration: {text}", path=path)
        return dict(model.state_dict())


class RandomWeights:
    """What the model's own initialisation makes of a fixed seed on the device: the same bytes every time."""

    from_files = False

    def __init__(self, model: Any) -> None:
        self._model = model

    def fill(self, targets: Mapping[str, torch.Tensor], steps: FillSteps = NO_STEPS) -> None:
        for name, target in targets.items():
            steps.before(name)
            target.fill_(float("nan") if target.is_floating_point() else 0)
        device = next(iter(targets.values())).device
        with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
            torch.manual_seed(_RANDOM_SEED)
            initialise(self._model)
        for name, target in targets.items():
            if target.is_floating_point() and bool(target.isnan().any()):
                raise ModelError(
                    f"{type(self._model).__name__} does not initialise {name}: it cannot run with load_format='random'"
                )
            steps.after(name)


class _Unchanged:
    """A checkpoint's files are still those that were resolved: by size, time and inode, or else byte for byte."""

    def __init__(self, resolved: ResolvedModel, checkpoint: Checkpoint) -> None:
        self._files = checkpoint.files
        self._signature = checkpoint.signature
        self._hash = resolved.weights_hash

    def check(self) -> None:
        signature = sign_files(self._files)
        if signature == self._signature:
            return
        if hash_files(self._files) != self._hash:
            folder = str(self._files[0].parent)
            raise ModelError(
                f"{folder}: the weights on disk are not those the engine was started with (changed or damaged since): "
                "restore them, or start anew",
                path=folder,
            )
        self._signature = signature


def initialise(model: Any, modules: Iterable[torch.nn.Module] | None = None) -> None:
    """Run the model's own initialisation on ``modules`` (None: all of them), in place."""
    with torch.no_grad():
        for module in model.modules() if modules is None else modules:
            model._init_weights(module)


@contextlib.contextmanager
def protected(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """For the length of the block, transformers' initialisation leaves these tensors alone (it honours this mark of its own)."""
    marked = list({id(tensor): tensor for tensor in tensors}.values())  # tied ones once
    for tensor in marked:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor in marked:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]
