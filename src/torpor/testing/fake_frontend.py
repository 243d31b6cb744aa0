"""The real front end over ``FakeEngine``, with a tokenizer of bytes: a chat template is ``role: content`` lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torpor.engine.frontend import Frontend
from torpor.engine.tokenizer import Tokenizer
from torpor.testing.fake_engine import EOS, FakeEngine


class ByteTokenizer:
    """As much of a ``transformers`` tokenizer as the front end uses."""

    all_special_ids = (EOS,)
    chat_template = "role: content"

    def __len__(self) -> int:
        return EOS + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        data = b"".join(bytes([t]) if t != EOS else b"" if skip_special_tokens else b"<eos>" for t in token_ids)
        return data.decode(errors="replace")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return f"<0x{token_id:02X}>"

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        if "refuse" in options:
            raise ValueError("refused")
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


def fake_frontend(engine: FakeEngine | None = None) -> Frontend:
    return Frontend(engine or FakeEngine(), Tokenizer(ByteTokenizer()))
