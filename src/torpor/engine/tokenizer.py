"""The model's tokenizer, as the front end uses it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from torpor.errors import ContextLengthError, ModelError, RequestError

SHORT_TEXT = 1 << 16  # characters; up to here a text is tokenized without a look at its length


class Tokenizer:
    """A ``transformers`` tokenizer. Thread-safe as far as that one is; every method is pure."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.token_text = lru_cache(maxsize=1 << 15)(self._token_text)
        self.is_special = lru_cache(maxsize=1 << 15)(self._is_special)

    @classmethod
    def load(cls, path: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """ModelError when the folder holds no tokenizer that works."""
        from torpor.engine.tokenizer_classes import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code))
        except Exception as error:
            raise ModelError(f"no usable tokenizer in {str(path)!r}: {error}", path=str(path)) from error

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1, added tokens included."""
        return len(self._tokenizer)

    @cached_property
    def _longest_token(self) -> int | None:
        """Characters that one token can stand for at most. None: not known."""
        vocabulary = getattr(self._tokenizer, "get_vocab", None)
        return max(map(len, vocabulary())) if vocabulary is not None else None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """RequestError, of the field ``param``, for text that is not valid Unicode; ContextLengthError for one that is certain to
        have more than ``max_tokens``: finding out how many would take seconds and gigabytes."""
        if max_tokens is not None:
            self._check_length(text, max_tokens, param)
        try:
            text.encode()  # tokenizers only say that it is no text
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode: {error}", param=param) from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check_length(self, text: str, max_tokens: int, param: str) -> None:
        if len(text) <= SHORT_TEXT or self._longest_token is None or len(text) <= max_tokens * self._longest_token:
            return
        raise ContextLengthError(
            f"the prompt has {len(text)} characters, more than {max_tokens} tokens (max_model_len) can be: shorten it",
            param=param,
            limit=max_tokens,
            setting="max_model_len",
        )

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        template_kwargs: dict[str, Any] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """RequestError when the model has no chat template, its template refuses the conversation, or as ``encode``."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError("this model has no chat template: use plain completions", param="messages")
        options = {"add_generation_prompt": True, **(template_kwargs or {}), "tokenize": False}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # whatever a template raises, it is about this conversation
            raise RequestError(f"the chat template does not take this conversation: {error}", param="messages") from error
        return self.encode(str(text), add_special_tokens=False, max_tokens=max_tokens, param="messages")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _token_text(self, token_id: int) -> str:
        """What the token adds to a text. Alone it is the beginning of one, where sentencepiece drops the space before a word."""
        once, twice = self.decode([token_id]), self.decode([token_id, token_id])
        return twice[len(once) :] if twice.startswith(once) else once

    def _is_special(self, token_id: int) -> bool:
        """Skipped where special tokens are. Twice, because a space alone would be dropped as the beginning of a text."""
        return not self.decode([token_id, token_id], skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, also where it is only a part of a character."""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        text = self.token_text(token_id)
        if "�" not in text or not isinstance(piece, str):
            return text.encode()
        if piece.startswith("<0x") and piece.endswith(">"):  # byte fallback
            return bytes([int(piece[3:-1], 16)])
        alphabet = _byte_alphabet()
        return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else text.encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: printable ones stand for themselves, the others are 256 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
