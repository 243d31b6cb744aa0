"""How kernels that know programmatic dependent launch (``dependent``) are launched."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


def launching(tensor: torch.Tensor) -> dict[str, Any]:
    """Keywords for the launch of a Triton kernel over ``tensor`` that takes DEPENDENT: it is one from Hopper on."""
    return {"DEPENDENT": True, "launch_pdl": True} if tensor.is_cuda and _dependent(tensor.device) else {"DEPENDENT": False}


@functools.cache
def _dependent(device: torch.device) -> bool:
    known = hasattr(importlib.import_module("triton.language.extra.cuda"), "gdc_wait")
    return known and torch.cuda.get_device_capability(device)[0] >= 9
