"""Connections of clients that are slow on purpose, or many: each is closed in bounded time, and newcomers still get in.

uvicorn bounds how long a connection may idle between two requests and nothing else. Here also: how long a request's head may
take, how long a client may leave our answer unread, and how many connections there are. How long a body may take is
``BodyLimit``'s.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

RESERVED_DESCRIPTORS = 256  # for everything but clients
UNLIMITED = 1 << 16
NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    head_s: float = 30.0  # for the request line and the headers, from the connection's begin or the last answer's end
    unread_s: float = 120.0  # for a client to take what fills the buffers, or anything of it
    connections: int | None = None  # None: as many as descriptors allow


def raise_descriptor_limit() -> int:
    """The soft limit to the hard one, as servers do; how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # the kernel's own limit is lower
            pass
    if soft == resource.RLIM_INFINITY:
        return UNLIMITED
    return min(UNLIMITED, max(soft - RESERVED_DESCRIPTORS, soft // 2))


class Lobby:
    """Connections without a request, oldest first. When there are too many connections, the oldest of these gives way."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._most = limits.connections or raise_descriptor_limit()
        self._waiting: dict[PatientProtocol, None] = {}

    def enter(self, protocol: PatientProtocol) -> None:
        self._waiting.pop(protocol, None)
        self._waiting[protocol] = None

    def leave(self, protocol: PatientProtocol) -> None:
        self._waiting.pop(protocol, None)

    def make_room(self, present: int) -> None:
        if present > self._most:
            next(iter(self._waiting)).drop()

    def protocol(self, *args: Any, **kwargs: Any) -> PatientProtocol:
        """What uvicorn calls for every connection."""
        return PatientProtocol(self, *args, **kwargs)


class PatientProtocol(H11Protocol):
    """uvicorn's, with an end to its patience."""

    def __init__(self, lobby: Lobby, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lobby = lobby
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        self._lobby.make_room(len(self.connections))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next request if one has been sent ahead
        if not self._answering:
            self._wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self._lobby.limits.unread_s, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # resumes writing
        self._stop_waiting()

    def drop(self) -> None:
        """Ends the connection at once, and drops what is unread, also in the kernel. The application sees a client that left."""
        self._stop_waiting()
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._lobby.enter(self)
        self._head_timer = self.loop.call_later(self._lobby.limits.head_s, self.drop)

    def _stop_waiting(self) -> None:
        self._lobby.leave(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
