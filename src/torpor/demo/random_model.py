"""Models of random weights, for machines that have no model: they talk nonsense, the same nonsense every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANDOM = "random"  # what the demo calls the small one
RANDOM_8B = "random:qwen3-8b"  # and one of a size that is served: it has no weights on disk
FIRST_PRINTABLE, LAST_PRINTABLE = 0x21, 0x7E  # of ASCII: what it says


QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def save_random_8b(folder: Path, **changes: Any) -> Path:
    """Writes the configuration of Qwen3-8B, with ``changes``, and a tokenizer with a made-up word for each of its tokens: the
    weights are drawn when an engine loads it with ``load_format="random"``."""
    from torpor.models.quiet import quiet_transformers
    from torpor.testing.tokenizers import EOS_ID, byte_tokenizer

    config = QWEN3_8B | {"eos_token_id": EOS_ID, "bos_token_id": EOS_ID} | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with quiet_transformers():
        byte_tokenizer(vocab_size=config["vocab_size"]).save_pretrained(folder)
    return folder


def save_random_model(folder: Path) -> Path:
    """Writes a Llama of 4 layers with a byte-level tokenizer: 9 MB. Nothing is downloaded."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from torpor.models.quiet import quiet_transformers
    from torpor.testing.tokenizers import EOS_ID, byte_tokenizer

    config = LlamaConfig(
        vocab_size=EOS_ID + 1,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=EOS_ID,
        bos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)  # with smaller ones it repeats a single token
            model.lm_head.weight[:FIRST_PRINTABLE] = model.lm_head.weight[LAST_PRINTABLE + 1 :] = 0  # a terminal shows the rest
    with quiet_transformers():
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder
