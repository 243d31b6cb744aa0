"""The native core, bound by ctypes. The contract is ``csrc/include/torpor/torpor.h``."""

from .blocks import BlockCopy, Words
from .device import ChunkImage, Device, Span
from .library import find_library
from .objects import Arena, Import, Region, buffer_at, host_free_bytes
from .torch_slot import TorchMode, TorchNews, TorchSlot, keep_forever, let_go
from .types import Ahead, CopyKind, DeviceStats, ExtentInfo, Op
from .verbs import share_system_verbs

__all__ = [
    "Ahead",
    "Arena",
    "BlockCopy",
    "ChunkImage",
    "CopyKind",
    "Device",
    "DeviceStats",
    "ExtentInfo",
    "Import",
    "Op",
    "Region",
    "Span",
    "TorchMode",
    "TorchNews",
    "TorchSlot",
    "Words",
    "buffer_at",
    "find_library",
    "host_free_bytes",
    "keep_forever",
    "let_go",
    "share_system_verbs",
]
