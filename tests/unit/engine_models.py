"""Small models on disk for the engine's tests: random weights that are really saved, with a byte-level tokenizer and chat
template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import save_tiny

from torpor.connectors.config import ConnectorConfig
from torpor.engine.config import EngineConfig
from torpor.engine.settings import config_from_settings
from torpor.testing.tokenizers import EOS_ID, byte_tokenizer


def save_model(folder: Path, seed: int = 5) -> Path:
    # Untied, and this seed: its texts vary from prompt to prompt and do not settle on one token.
    special = {"eos_token_id": EOS_ID, "bos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    save_tiny(folder, seed=seed, vocab_size=EOS_ID + 1, tie_word_embeddings=False, **special)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_settings(**settings: Any) -> dict[str, Any]:
    small: dict[str, Any] = {
        "dtype": "float32",
        "threads": 1,
        "num_blocks": 48,
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "extent_bytes": 1 << 20,
        "enable_sleep_mode": True,
    }
    return small | settings


def tiny_engine(folder: Path, *, connector: ConnectorConfig | None = None, **settings: Any) -> EngineConfig:
    return config_from_settings(str(folder), connector=connector, **tiny_settings(**settings))
