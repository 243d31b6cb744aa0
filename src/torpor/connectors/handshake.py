"""The first messages of a connection, both sides: protocol, transport, proof of the shared secret."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from torpor.connectors import auth, wire
from torpor.connectors.channel import Channel
from torpor.errors import AsleepError, HandshakeError, PeerError, TorporError

M = TypeVar("M", bound=wire.Message)


class Refused(HandshakeError):
    """Raised where we refuse; ``reason`` and the text go to the peer before the connection ends."""


def expect(channel: Channel, kind: type[M], deadline: float) -> tuple[M, bytes]:
    """The next message, which must be of that kind. PeerError: silence, garbage, another kind; a Refusal raises what it means."""
    received = channel.receive(max(0.0, deadline - time.monotonic()))
    if received is None:
        raise PeerError(f"{channel.peer} did not send {kind.__name__} in time", peer=channel.peer)
    message, payload = received
    if isinstance(message, kind):
        return message, payload
    if isinstance(message, wire.Refusal):
        raise _meaning(message, channel.peer)
    raise PeerError(f"{channel.peer} sent {type(message).__name__} where {kind.__name__} is due", peer=channel.peer)


def greet(channel: Channel, secret: bytes | None, transport: str, deadline: float) -> None:
    """The reader's side. Afterwards the owner is known to share our secret, when we have one."""
    hello = channel.send(
        wire.Hello(
            protocol=wire.PROTOCOL, transport=transport, secret=secret is not None, nonce=secrets.token_bytes(wire.NONCE_BYTES)
        )
    )
    challenge, challenge_payload = expect(channel, wire.Challenge, deadline)
    _check_protocol(challenge.protocol, channel.peer)
    _check_secret(secret, challenge.secret, channel.peer)
    if secret is None:
        return
    digest = auth.transcript(hello, challenge_payload)
    channel.send(wire.Proof(mac=auth.prove(secret, "reader", digest)))
    accept, _ = expect(channel, wire.Accept, deadline)
    if not auth.proves(accept.mac, secret, "owner", digest):
        raise HandshakeError(f"{channel.peer} did not prove the shared secret: is its kv_secret_file ours?", peer=channel.peer)
    keys = auth.session_keys(secret, digest)
    channel.secure(send_key=keys.reader, receive_key=keys.owner)


def receive_greeting(channel: Channel, secret: bytes | None, transport: str, deadline: float) -> None:
    """The owner's side. Raises Refused for what the peer should be told."""
    hello, hello_payload = expect(channel, wire.Hello, deadline)
    _check_protocol(hello.protocol, channel.peer)
    if hello.transport != transport:
        raise Refused(
            f"this engine's kv_connector is {transport!r}, yours {hello.transport!r}", peer=channel.peer, reason="transport"
        )
    _check_secret(secret, hello.secret, channel.peer)
    challenge = channel.send(
        wire.Challenge(protocol=wire.PROTOCOL, secret=secret is not None, nonce=secrets.token_bytes(wire.NONCE_BYTES))
    )
    if secret is None:
        return
    digest = auth.transcript(hello_payload, challenge)
    proof, _ = expect(channel, wire.Proof, deadline)
    if not auth.proves(proof.mac, secret, "reader", digest):
        raise Refused(
            "the shared secret is not proved: both engines need the same kv_secret_file", peer=channel.peer, reason="secret"
        )
    channel.send(wire.Accept(mac=auth.prove(secret, "owner", digest)))
    keys = auth.session_keys(secret, digest)
    channel.secure(send_key=keys.owner, receive_key=keys.reader)


def refuse(channel: Channel, error: TorporError) -> None:
    """Tells the peer why, as far as it may know. The connection is over anyway: that the peer is gone already is no news."""
    reason = str(error.fields.get("reason", "error"))
    try:
        channel.send(wire.Refusal(reason=reason[:256], text=error.message[:4096]))
    except PeerError:
        return


def checked(channel: Channel, check: Callable[[], None], reason: str) -> None:
    """Runs a check whose HandshakeError the peer should read."""
    try:
        check()
    except HandshakeError as error:
        raise Refused(error.message, **{**error.fields, "peer": channel.peer, "reason": reason}) from error


def _check_protocol(theirs: int, who: str) -> None:
    if theirs != wire.PROTOCOL:
        raise Refused(
            f"control protocol {theirs} meets {wire.PROTOCOL}: run the same torpor version on both engines",
            peer=who,
            reason="protocol",
        )


def _check_secret(ours: bytes | None, theirs: bool, who: str) -> None:
    if (ours is not None) != theirs:
        has, lacks = (
            ("this engine has", "the other has not") if ours is not None else ("the other engine has", "this one has not")
        )
        raise Refused(
            f"{has} a shared secret, {lacks}: give both the same kv_secret_file",
            peer=who,
            reason="secret",
            setting="kv_secret_file",
        )


def _meaning(refusal: wire.Refusal, who: str) -> TorporError:
    if refusal.reason == "asleep":
        return AsleepError(f"{who} is asleep: {refusal.text}", state="asleep", peer=who)
    return HandshakeError(f"{who} refused: {refusal.text}", peer=who, reason=refusal.reason)
