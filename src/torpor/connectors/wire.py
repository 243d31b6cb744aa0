"""The messages of the control channel: msgpack, typed, and nothing else. What does not decode into one of them is refused.

    reader                                owner
      Hello                 ->
                            <-            Challenge            (or Refusal)
      Proof                 ->                                 with a shared secret only
                            <-            Accept               with a shared secret only
      ImportRequest         ->
                            <-            Offer [+ Descriptors...]   (or Refusal)
      ReadDone, Ping ...    ->
                            <-            Withdraw
      Withdrawn             ->
      Goodbye               ->

One connection is one import of one epoch: whoever needs another one makes another connection.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from torpor.errors import HandshakeError, PeerError
from torpor.kvcache.types import Epoch, KVCacheSpec

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 20
NONCE_BYTES = 32
MAC_BYTES = 32

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Size = Annotated[int, Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, Meta(ge=0.01, le=3600.0)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    protocol: Count
    transport: Name
    secret: bool  # whether the sender has a shared secret and will talk to nobody without it
    nonce: Nonce


class Challenge(Message, frozen=True, kw_only=True, tag="challenge"):
    protocol: Count
    secret: bool
    nonce: Nonce


class Proof(Message, frozen=True, kw_only=True, tag="proof"):
    mac: Mac


class Accept(Message, frozen=True, kw_only=True, tag="accept"):
    mac: Mac


class WireSpec(Message, frozen=True, kw_only=True):
    model_id: Text
    num_layers: Count
    num_blocks: Count
    block_size: Count
    num_kv_heads: Count
    head_dim: Count
    dtype: Name


class ImportRequest(Message, frozen=True, kw_only=True, tag="import"):
    engine_id: Name  # the reader's
    remote_engine_id: Name  # whom it believes to talk to
    spec: WireSpec
    heartbeat_s: Seconds  # at least one message comes in that time


class WireRegion(Message, frozen=True, kw_only=True):
    address: Size  # in the owner
    extents: Annotated[list[Size], Meta(max_length=1 << 16)]  # sizes, in order; their sum is the region's


class WirePlace(Message, frozen=True, kw_only=True):
    """Where the tensor of a layer begins."""

    region: Count
    offset: Size


class Offer(Message, frozen=True, kw_only=True, tag="offer"):
    engine_id: Name
    epoch: Text
    spec: WireSpec
    driver: Name = "host"  # where the KV cache lies: the driver's name, and the number of its device
    device: Count = 0
    regions: Annotated[list[WireRegion], Meta(max_length=4096)]
    layers: Annotated[list[WirePlace], Meta(max_length=4096)]
    fence_address: Size
    fence_slots: Count
    lease_key: Annotated[bytes, Meta(min_length=16, max_length=64)]
    descriptors: Annotated[int, Meta(ge=0, le=1 << 16)] = (
        0  # how many file descriptors follow: the fence's, then those of the extents
    )
    blob: Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES // 2)] = b""  # the transport's own


class Descriptors(Message, frozen=True, kw_only=True, tag="descriptors"):
    count: Annotated[int, Meta(ge=1, le=250)]


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    reason: Name  # "asleep", "secret", "protocol", "spec", "engine_id", "busy", "error"
    text: Text


class Withdraw(Message, frozen=True, kw_only=True, tag="withdraw"):
    epoch: Text


class Withdrawn(Message, frozen=True, kw_only=True, tag="withdrawn"):
    """Nothing in flight, no import, no remote handle of that epoch is left."""

    epoch: Text


class ReadDone(Message, frozen=True, kw_only=True, tag="read_done"):
    """The reader needs this hand-off no longer: it has read it, or never will. The commitment shows that it knows what was
    handed off."""

    lease: Size
    commitment: Annotated[bytes, Meta(min_length=8, max_length=8)]


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    pass


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """As ``Withdrawn``, without being asked."""


AnyMessage = (
    Hello
    | Challenge
    | Proof
    | Accept
    | ImportRequest
    | Offer
    | Descriptors
    | Refusal
    | Withdraw
    | Withdrawn
    | ReadDone
    | Ping
    | Goodbye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """PeerError for anything that is not exactly one known message."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"not a control message: {error}") from error


def to_wire(spec: KVCacheSpec) -> WireSpec:
    return WireSpec(**{name: getattr(spec, name) for name in WireSpec.__struct_fields__})


def from_wire(spec: WireSpec) -> KVCacheSpec:
    return KVCacheSpec(**msgspec.structs.asdict(spec))


_SETTING_OF = {"block_size": "block_size", "dtype": "dtype"}


def check_compatible(ours: KVCacheSpec, theirs: WireSpec, who: str) -> None:
    """HandshakeError naming the first field that differs, both values and the setting. ``num_blocks`` may differ."""
    for name in ("model_id", "num_layers", "num_kv_heads", "head_dim", "dtype", "block_size"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            setting = _SETTING_OF.get(name, "model")
            raise HandshakeError(
                f"{who} has {name} {there!r}, we have {here!r}: both engines need the same {setting}",
                peer=who,
                field=name,
                ours=here,
                theirs=there,
                setting=setting,
            )


def parse_epoch(text: str, who: str) -> Epoch:
    try:
        return Epoch.parse(text)
    except ValueError as error:
        raise HandshakeError(f"{who} sent {text[:64]!r} for an epoch", peer=who) from error


_NOTICE = struct.Struct("<4sQQ")
_NOTICE_MARK = b"tpr1"


def read_notice(lease: int, commitment: int) -> bytes:
    """Goes along with the bytes of a read, where the transport can. Whoever was not told the lease cannot make one."""
    return _NOTICE.pack(_NOTICE_MARK, lease, commitment)


def parse_read_notice(notice: bytes) -> tuple[int, int] | None:
    """Lease and commitment; None for anything else, which a peer may send as it likes."""
    if len(notice) != _NOTICE.size:
        return None
    mark, lease, commitment = _NOTICE.unpack(notice)
    return (lease, commitment) if mark == _NOTICE_MARK else None
