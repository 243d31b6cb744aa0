"""LLM serving whose device memory can sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torpor.engine.llm import LLM
    from torpor.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """``torpor.LLM`` and ``torpor.SamplingParams``, imported when first used: ``import torpor`` stays light."""
    if name == "LLM":
        from torpor.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from torpor.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
