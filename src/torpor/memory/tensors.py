"""Torch tensors over addresses of a pool. Only this module of the memory layer and ``torch_cuda`` import torch, at first use."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torpor._native import buffer_at
from torpor.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

Shape = int | Sequence[int]


class _DeviceBytes:
    """What torch needs to see device memory at an address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def checked_shape(shape: Shape) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(int(s) for s in shape)
    if any(s < 0 for s in sizes):
        raise ConfigurationError(f"shape {sizes} cannot be: sizes must be 0 or more", setting="shape", value=str(sizes))
    return sizes


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype | None) -> tuple[int, torch.dtype]:
    """The size, and the dtype with torch's default filled in."""
    import torch

    kind = torch.get_default_dtype() if dtype is None else dtype
    return math.prod(shape) * kind.itemsize, kind


def tensor_at(
    address: int, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype, ordinal: int | None, on_death: Callable[[], None]
) -> torch.Tensor:
    """A contiguous tensor over ``nbytes`` at ``address`` (``ordinal`` None: host memory). Not a view: its storage is the range.

    ``on_death`` runs once, when the storage and everything that shares it is gone. It may run inside garbage collection, on any
    thread, so it must neither lock nor call anything that does.
    """
    import torch

    owner: Any = buffer_at(address, nbytes) if ordinal is None else _DeviceBytes(address, nbytes)
    weakref.finalize(owner, on_death).atexit = False
    host = ordinal is None
    raw = torch.frombuffer(owner, dtype=torch.uint8) if host else torch.as_tensor(owner, device=f"cuda:{ordinal}")
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device=raw.device)
    return tensor.set_(raw.untyped_storage(), 0, shape, strides)


def empty_nowhere(shape: tuple[int, ...], dtype: torch.dtype, ordinal: int | None) -> torch.Tensor:
    """A tensor without bytes: it lies in no pool and loses nothing in a sleep."""
    import torch

    return torch.empty(shape, dtype=dtype, device="cpu" if ordinal is None else f"cuda:{ordinal}")


def torch_sees_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def storage_address(tensor: torch.Tensor) -> int:
    """Where the storage begins; 0 when it has no bytes."""
    return tensor.untyped_storage().data_ptr()
