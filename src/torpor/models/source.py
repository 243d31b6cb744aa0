"""From what the user named to a folder that can be loaded: a Hugging Face folder, a ``.gguf`` file, or a built-in name.

Nothing is ever downloaded. Every refusal says what was found and which setting or package would help.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from torpor.errors import ConfigurationError, ModelError
from torpor.models.checkpoint import Checkpoint, open_checkpoint
from torpor.models.checkpoint_files import read_json
from torpor.models.config import ModelConfig
from torpor.models.gguf_convert import Progress, convert_gguf
from torpor.models.places import find_model

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
MAX_LAYERS = 4096
# Entries of config.json that differ between equal models.
VOLATILE = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that exists on this machine, checked as far as that goes without loading it."""

    name: str  # what it is served as
    path: Path  # folder with config.json and, but for random weights, safetensors files
    model_id: str  # architecture@hash of configuration and weights: equal on two machines exactly when the models are
    tokenizer_path: str
    hf_config: Any  # transformers.PretrainedConfig
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    checkpoint: Checkpoint | None  # None: random weights
    weights_hash: str  # of the checkpoint's bytes


def resolve_model(config: ModelConfig, progress: Progress = lambda what, done: None) -> ResolvedModel:
    """Finds the model, converts it if it is GGUF (``progress`` tells what is done and how much of it), and hashes its weights.

    ModelError for what is missing, damaged or not supported; ConfigurationError for settings that do not fit the model.
    """
    folder, default_name, known_hash = _locate(config, progress)
    raw = read_json(folder / "config.json")
    hf_config = _read_hf_config(folder, raw, config.trust_remote_code)
    progress("checking the weights", 0.0)
    checkpoint = open_checkpoint(folder) if config.load_format == "auto" else None
    content = "random" if checkpoint is None else known_hash or checkpoint.digest()
    progress("checking the weights", 1.0)
    return ResolvedModel(
        name=config.served_name or default_name,
        path=folder,
        model_id=_model_id(raw, content),
        tokenizer_path=str(folder),
        hf_config=hf_config,
        eos_token_ids=_eos_token_ids(folder, hf_config),
        max_model_len=_max_model_len(hf_config, config.max_model_len),
        checkpoint=checkpoint,
        weights_hash=content,
    )


def _locate(config: ModelConfig, progress: Progress) -> tuple[Path, str, str | None]:
    """The folder to load, the model's name unless the user gives one, and the weights' hash where it is known already."""
    path, name = find_model(config.source)
    if path.is_file():
        return _convert(path, name, config, progress)
    return path, name, None


def _convert(path: Path, name: str, config: ModelConfig, progress: Progress) -> tuple[Path, str, str | None]:
    folder, weights_hash = convert_gguf(path, config.cache_folder, progress)
    return folder, name, weights_hash


def _read_hf_config(folder: Path, raw: dict[str, Any], trust_remote_code: bool) -> Any:
    check_layer_counts(folder / "config.json", raw)
    if raw.get("auto_map") and "model_type" not in raw and not trust_remote_code:
        raise _needs_trust(folder)
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever its parsing and the model's own checks meet
        if raw.get("auto_map") and not trust_remote_code:
            raise _needs_trust(folder) from error
        path = folder / "config.json"
        raise ModelError(f"{path}: transformers cannot use this configuration: {error}", path=str(path)) from error


def check_layer_counts(path: Path, raw: object) -> None:
    """transformers makes lists of that length before anybody looks at the weights."""
    if not isinstance(raw, dict):
        return
    for name, value in raw.items():
        if name in _LAYER_COUNTS and isinstance(value, (int, float)) and not 0 < value <= MAX_LAYERS:
            raise ModelError(f"{path}: {name} is {value:g}, a model has 1 to {MAX_LAYERS} layers", path=str(path))
        if name.endswith("_config"):
            check_layer_counts(path, value)


def _needs_trust(folder: Path) -> ModelError:
    return ModelError(
        f"{folder}: this model brings its own code; it is run only with trust_remote_code=True",
        path=str(folder),
        setting="trust_remote_code",
    )


def _model_id(raw: dict[str, Any], content: str) -> str:
    stable = {key: value for key, value in raw.items() if key not in VOLATILE}
    text = json.dumps(stable, sort_keys=True) + content
    return f"{raw.get('model_type', 'model')}@{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _eos_token_ids(folder: Path, hf_config: Any) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.exists() else None
    if found is None:
        path, found = folder / "config.json", getattr(hf_config.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    ids = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    if not all(type(token) is int for token in ids):
        raise ModelError(
            f"{path}: eos_token_id is {reprlib.repr(found)}, which is no token id and no list of them", path=str(path)
        )
    # Some configurations name an end that is none (-1, or one beyond the vocabulary). No text ends with it, and min_tokens could
    # not forbid it: there is no such column in the logits, or it is another token's.
    vocab_size = getattr(hf_config.get_text_config(), "vocab_size", None)
    return tuple(token for token in ids if token >= 0 and (vocab_size is None or token < vocab_size))


def _max_model_len(hf_config: Any, setting: int | None) -> int:
    limit = context_limit(hf_config)
    if setting is None:
        if limit is None:
            raise ConfigurationError(
                "the model's config.json names no context length: set max_model_len", setting="max_model_len"
            )
        return limit
    if limit is not None and setting > limit:
        raise ConfigurationError(
            f"max_model_len {setting} is not within 1 and the model's own limit of {limit} tokens",
            setting="max_model_len",
            value=setting,
        )
    return setting


def context_limit(hf_config: Any) -> int | None:
    """Tokens up to which one set of rotary frequencies holds. Beyond its original length a ``longrope`` model switches to other
    frequencies for all tokens of a context, which keys that are already in the cache cannot follow."""
    text_config = hf_config.get_text_config()
    limits = [getattr(text_config, name, None) for name in _LENGTH_NAMES]
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limits.append(
            rope.get("original_max_position_embeddings") or getattr(text_config, "original_max_position_embeddings", None)
        )
    return min((int(limit) for limit in limits if limit), default=None)
