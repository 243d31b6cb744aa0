"""Other weights for a model that is loaded: which checkpoint may take the place of the one the engine was started with."""

from __future__ import annotations

import dataclasses
from typing import Any

from torpor.errors import ConfigurationError, ModelError
from torpor.models.config import ModelConfig
from torpor.models.source import VOLATILE, ResolvedModel, resolve_model

# A trainer writes its tokenizer's into the configuration; the computation has no use for them.
TOKENIZERS_OWN = frozenset({"pad_token_id", "bos_token_id"})


def resolve_update(current: ResolvedModel, config: ModelConfig, source: str) -> ResolvedModel:
    """``source`` is what ``ModelConfig.source`` may be. Blocks while the weights are hashed, and a GGUF file converted.

    ModelError unless it is a checkpoint of the very same configuration: everything but the weights stays as it is, the tokenizer
    too. ConfigurationError for an engine with random weights.
    """
    if current.checkpoint is None:
        raise ConfigurationError(
            "the engine runs random weights (load_format='random'), which no checkpoint replaces", setting="load_format"
        )
    found = resolve_model(dataclasses.replace(config, source=source, served_name=current.name))
    here, there = _stable(current.hf_config), _stable(found.hf_config)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise ModelError(
                f"{source}: its config.json says {name} is {there.get(name)!r}, the engine was started with {here.get(name)!r}: "
                "only weights can be updated; start anew for another model",
                path=source,
            )
    return dataclasses.replace(
        found, tokenizer_path=current.tokenizer_path, eos_token_ids=current.eos_token_ids, max_model_len=current.max_model_len
    )


def _stable(hf_config: Any) -> dict[str, Any]:
    return {name: value for name, value in hf_config.to_dict().items() if name not in VOLATILE | TOKENIZERS_OWN}
