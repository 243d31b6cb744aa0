"""Which dtype a model computes in."""

from __future__ import annotations

import torch

from torpor.errors import ConfigurationError
from torpor.models.hardware import has_bf16_units

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def choose_dtype(setting: str, checkpoint: torch.dtype, *, on_cpu: bool) -> torch.dtype:
    """``auto`` is the checkpoint's own dtype, but float32 on CPUs that have no bfloat16 units (float16 has none on any CPU)."""
    if setting != "auto":
        if setting not in DTYPES:
            raise ConfigurationError(
                f"dtype {setting!r} is not known; known: auto, {', '.join(DTYPES)}", setting="dtype", value=setting
            )
        return DTYPES[setting]
    if checkpoint not in DTYPES.values():
        return torch.float32
    if on_cpu and (checkpoint == torch.float16 or not has_bf16_units()):
        return torch.float32
    return checkpoint
