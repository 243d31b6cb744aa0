"""Slots: the pairs of functions that torch's pluggable allocator calls, and what has come of those calls.

The functions themselves need no Python: they run on any thread, without the interpreter's lock, also when it is gone.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import Any

from torpor.errors import TorporError

from .device import Device
from .library import TpTorchRefusal, call, exception_of
from .objects import Region, unsigned

_EXPORTABLE, _GUARDED = 1, 2
_BATCH = 256  # regions or addresses taken with one call


class TorchMode(enum.IntEnum):
    """What torch may do. Setting one returns when no call of torch is under way any more that it does not allow."""

    HELD = 1  # the owner is at work: torch allocates, what it frees keeps its memory
    OPEN = 2  # torch allocates, what it frees is unmapped at once
    SHUT = 3  # torch gets nothing, what it frees keeps its memory


@dataclass(frozen=True, slots=True)
class TorchNews:
    """``born``: regions that torch was given. ``dead``: addresses of those it has freed; they are the caller's to destroy, but
    not before it has set a mode."""

    born: tuple[Region, ...]
    dead: tuple[int, ...]


class TorchSlot:
    """A slot bound to one pool of one device. All methods may be called from any thread."""

    def __init__(self, device: Device, ordinal: int, *, extent_bytes: int, exportable: bool, guarded: bool, name: str) -> None:
        """HELD. ``ordinal``: the device as torch counts. StateError when every slot is taken."""
        out = ctypes.c_uint32()
        flags = (_EXPORTABLE if exportable else 0) | (_GUARDED if guarded else 0)
        size = unsigned("extent_bytes", extent_bytes)
        call("tp_torch_open", device.handle, ordinal, size, flags, name.encode(), ctypes.byref(out))
        self._index = out.value
        self._name = name
        self._born = (ctypes.c_void_p * _BATCH)()
        self._dead = (ctypes.c_uint64 * _BATCH)()

    @property
    def functions(self) -> tuple[str, str]:
        """The names of the two functions in the library: allocate, free."""
        return f"tp_torch_alloc_{self._index}", f"tp_torch_free_{self._index}"

    def set_mode(self, mode: TorchMode) -> None:
        call("tp_torch_set_mode", self._index, int(mode))

    def take(self) -> TorchNews:
        """What has happened since the last call. One caller at a time."""
        born: list[Region] = []
        dead: list[int] = []
        born_count, dead_count = ctypes.c_uint64(_BATCH), ctypes.c_uint64()
        while _BATCH in (born_count.value, dead_count.value):
            counts = ctypes.byref(born_count), ctypes.byref(dead_count)
            call("tp_torch_take", self._index, self._born, _BATCH, counts[0], self._dead, _BATCH, counts[1])
            born += (Region(handle, self._name) for handle in self._born[: born_count.value] if handle)
            dead += self._dead[: dead_count.value]
        return TorchNews(tuple(born), tuple(dead))

    def refusals(self) -> tuple[int, TorporError | None]:
        """How often torch was given nothing, and why it was the last time."""
        out = TpTorchRefusal()
        call("tp_torch_get_refusal", self._index, ctypes.byref(out))
        return out.count, exception_of(out.last) if out.count else None

    def disown(self) -> None:
        """Regions not taken as dead are the slot's from here on, and go when torch frees them; torch gets nothing. Last call."""
        call("tp_torch_disown", self._index)


def keep_forever(thing: Any) -> None:
    """One reference that nobody has: the interpreter's exit does not run the object's destructor."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def let_go(thing: Any) -> None:
    """Takes back what ``keep_forever`` did."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))
