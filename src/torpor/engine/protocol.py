"""Messages between a client and the engine core: tagged structs, msgpack on the wire, no pickle.

In one process the very same structs pass through a queue, so both ways behave alike.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from torpor.engine.base import SleepMode, SleepRequest
from torpor.errors import RequestError
from torpor.request import EngineOutput, GenerationRequest

MAX_MESSAGE_BYTES = 256 << 20  # a longer frame closes the connection: both ends are ours, so it is damage, not load


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    pass


# ---- operations: what Call carries --------------------------------------------------------------------------------------------


class Sleep(_Message, tag="sleep", frozen=True, kw_only=True):
    request: SleepRequest


class WakeUp(_Message, tag="wake_up", frozen=True, kw_only=True):
    tags: list[str] | None = None


class Pause(_Message, tag="pause", frozen=True, kw_only=True):
    mode: SleepMode = "keep"


class Resume(_Message, tag="resume", frozen=True, kw_only=True):
    pass


class ReleaseKVCache(_Message, tag="release_kv_cache", frozen=True, kw_only=True):
    pass


class UpdateWeights(_Message, tag="update_weights", frozen=True, kw_only=True):
    model: str


class Stats(_Message, tag="stats", frozen=True, kw_only=True):
    pass


class Ping(_Message, tag="ping", frozen=True, kw_only=True):
    """Answered by the loop as soon as it turns."""


class Shutdown(_Message, tag="shutdown", frozen=True, kw_only=True):
    pass


Operation: TypeAlias = Sleep | WakeUp | Pause | Resume | ReleaseKVCache | UpdateWeights | Stats | Ping | Shutdown

# ---- client to core -----------------------------------------------------------------------------------------------------------


class Add(_Message, tag="add", frozen=True, kw_only=True):
    request: GenerationRequest


class Abort(_Message, tag="abort", frozen=True, kw_only=True):
    request_ids: list[str]


class Call(_Message, tag="call", frozen=True, kw_only=True):
    """Answered by exactly one Reply with the same id, in any order."""

    id: int
    operation: Operation


ToCore: TypeAlias = Add | Abort | Call

# ---- core to client -----------------------------------------------------------------------------------------------------------


class Progress(_Message, tag="progress", frozen=True, kw_only=True):
    phase: str
    fraction: float  # 0..1 of this phase


class Ready(_Message, tag="ready", frozen=True, kw_only=True):
    info: dict[str, Any]  # EngineInfo as plain data


class StateChanged(_Message, tag="state", frozen=True, kw_only=True):
    state: str  # EngineState's value


class Outputs(_Message, tag="outputs", frozen=True, kw_only=True):
    """What one step produced."""

    outputs: list[EngineOutput]


class Refused(_Message, tag="refused", frozen=True, kw_only=True):
    """An Add that was not taken; ``generate`` raises the error."""

    request_id: str
    error: dict[str, Any]


class Reply(_Message, tag="reply", frozen=True, kw_only=True):
    id: int
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class Fatal(_Message, tag="fatal", frozen=True, kw_only=True):
    """The core ends: during start-up (the client raises the error itself) or later (EngineDeadError with this as cause)."""

    error: dict[str, Any]


ToClient: TypeAlias = Progress | Ready | StateChanged | Outputs | Refused | Reply | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToCore | ToClient) -> bytes:
    return _encoder.encode(message)


def decode_to_core(data: bytes) -> ToCore:
    """msgspec.ValidationError or DecodeError for anything ``encode`` did not make."""
    return _to_core.decode(data)


def decode_to_client(data: bytes) -> ToClient:
    return _to_client.decode(data)


def check_operation(operation: Operation) -> None:
    """RequestError for the first field that the core could not read: it would end, and with it everybody's requests."""
    part: msgspec.Struct = operation.request if isinstance(operation, Sleep) else operation
    for field in msgspec.structs.fields(part):
        value = getattr(part, field.name)
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=field.type)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            message = f"{field.name} cannot be sent to the engine: {error}"
            raise RequestError(message, param=field.name, value=repr(value)) from error
