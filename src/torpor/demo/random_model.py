"""A small model of random weights, for machines that have no model: it talks nonsense, the same nonsense every time."""

from __future__ import annotations

from pathlib import Path

RANDOM = "random"  # what the demo calls it
FIRST_PRINTABLE, LAST_PRINTABLE = 0x21, 0x7E  # of ASCII: what it says


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
