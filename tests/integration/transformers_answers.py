"""What transformers itself answers to chat prompts, greedy, float32: the reference of everything above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torpor.models import ModelConfig, resolve_model
from torpor.models.quiet import quiet_transformers


def transformers_answers(source: str, questions: Sequence[str], max_tokens: int) -> list[str]:
    resolved = resolve_model(ModelConfig(source=source))
    tokenizer: Any = AutoTokenizer.from_pretrained(resolved.tokenizer_path, local_files_only=True)
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(resolved.path, dtype=torch.float32, local_files_only=True)
    answers = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return answers
