"""A tokenizer without a download: 256 byte tokens and a few special ones."""

from __future__ import annotations

from typing import Any

EOS_ID = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE, vocab_size: int = EOS_ID + 1) -> Any:
    """A ``transformers`` fast tokenizer whose token i is byte i, and whose token 256 is ``</s>``. Tokens beyond are words that no
    text becomes but that a model may say: 300 is " w300"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = _alphabet()
    words = {f"{alphabet[ord(' ')]}w{token}": token for token in range(EOS_ID + 1, vocab_size)}
    eos = {"</s>": EOS_ID}
    model = models.BPE(vocab={alphabet[byte]: byte for byte in range(256)} | eos | words, merges=[])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def _alphabet() -> list[str]:
    """GPT-2's printable spelling of every byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]
