"""The tokenizer class of transformers, in a module of its own: importing it takes seconds."""

from transformers import AutoTokenizer

__all__ = ["AutoTokenizer"]
