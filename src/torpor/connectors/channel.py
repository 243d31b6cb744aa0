"""Frames over a stream socket: 4 bytes of length (big endian), the payload, and a MAC once the session has keys.

A frame that is too long, does not decode, or carries a wrong MAC ends the connection, with PeerError for whoever reads it.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import select
import socket
import threading
import time
from collections.abc import Sequence

from torpor.connectors import auth, wire
from torpor.errors import PeerError

MAX_DESCRIPTORS = 250  # of one message; the kernel's limit is 253
_ANCILLARY_BYTES = socket.CMSG_SPACE((MAX_DESCRIPTORS + 3) * array.array("i").itemsize)


def close_descriptors(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


class Channel:
    """One connection. ``send`` may be called from any thread, ``receive`` from one at a time. ``abort`` wakes both from any
    thread; ``close`` belongs to the thread that receives. Both are idempotent."""

    def __init__(
        self, sock: socket.socket, peer: str, *, io_timeout_s: float = 5.0, max_frame_bytes: int = wire.MAX_FRAME_BYTES
    ) -> None:
        sock.setblocking(False)
        self.peer = peer  # for messages: "d1 (pid 4711)"
        self._sock = sock
        self._io_timeout_s = io_timeout_s
        self._max_frame_bytes = max_frame_bytes
        self._send_lock = threading.Lock()
        self._send_key: bytes | None = None
        self._receive_key: bytes | None = None
        self._sent = 0
        self._received = 0
        self._descriptors: list[int] = []

    @property
    def is_local(self) -> bool:
        return self._sock.family == socket.AF_UNIX

    def secure(self, send_key: bytes, receive_key: bytes) -> None:
        """From the next frame on, both directions are signed."""
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0

    def send(self, message: wire.AnyMessage, descriptors: Sequence[int] = ()) -> bytes:
        """Blocks at most the I/O timeout; returns the payload that went out. PeerError when the peer is gone or does not take
        it."""
        payload = wire.encode(message)
        with self._send_lock:
            frame = payload if self._send_key is None else payload + auth.frame_mac(self._send_key, self._sent, payload)
            if len(frame) > self._max_frame_bytes:
                raise PeerError(
                    f"a message of {len(frame)} bytes to {self.peer} is over the limit of {self._max_frame_bytes}", peer=self.peer
                )
            self._sent += 1
            try:
                self._send_all(len(frame).to_bytes(4, "big") + frame, descriptors)
            except OSError as error:
                raise PeerError(f"{self.peer} is gone: {error.strerror or error}", peer=self.peer) from error
        return payload

    def receive(self, timeout_s: float) -> tuple[wire.AnyMessage, bytes] | None:
        """The next message and its payload; None when none began within ``timeout_s``. PeerError: end of stream, garbage, a bad
        MAC."""
        try:
            if not self._wait(select.POLLIN, time.monotonic() + timeout_s):
                return None
            deadline = time.monotonic() + self._io_timeout_s
            length = int.from_bytes(self._receive_exactly(4, deadline), "big")
            if not 0 < length <= self._max_frame_bytes:
                raise PeerError(
                    f"{self.peer} sent a frame of {length} bytes, the limit is {self._max_frame_bytes}", peer=self.peer
                )
            payload = self._verified(self._receive_exactly(length, deadline))
        except OSError as error:
            raise PeerError(f"{self.peer} is gone: {error.strerror or error}", peer=self.peer) from error
        return wire.decode(payload), payload

    def take_descriptors(self) -> list[int]:
        """The file descriptors that came with what was received; they are the caller's to close."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def hung_up(self) -> bool:
        """Whether the peer has closed it or died, as the kernel knows it now: before whoever receives has heard of it."""
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLRDHUP)
        return bool(poller.poll(0))

    def abort(self) -> None:
        """Ends the connection under whoever sends or receives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        with self._send_lock:
            self._sock.close()
        close_descriptors(self.take_descriptors())

    def _verified(self, frame: bytes) -> bytes:
        if self._receive_key is None:
            return frame
        payload, mac = frame[: -wire.MAC_BYTES], frame[-wire.MAC_BYTES :]
        if not hmac.compare_digest(mac, auth.frame_mac(self._receive_key, self._received, payload)):
            raise PeerError(f"{self.peer} sent a frame with a wrong signature", peer=self.peer)
        self._received += 1
        return payload

    def _wait(self, event: int, deadline: float) -> bool:
        fd = self._sock.fileno()
        if fd < 0:
            raise OSError("the connection was closed here")
        poller = select.poll()
        poller.register(fd, event)
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _send_all(self, data: bytes, descriptors: Sequence[int]) -> None:
        deadline = time.monotonic() + self._io_timeout_s
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        view = memoryview(data)
        while view:
            if not self._wait(select.POLLOUT, deadline):
                # Half a frame may be out: nothing that follows could be understood.
                self.abort()
                raise TimeoutError(f"it took no message for {self._io_timeout_s:g} s")
            with contextlib.suppress(BlockingIOError):
                sent = self._sock.sendmsg([view], ancillary, socket.MSG_NOSIGNAL)
                view, ancillary = view[sent:], []

    def _receive_exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not self._wait(select.POLLIN, deadline):
                raise TimeoutError(f"it stopped in the middle of a frame for {self._io_timeout_s:g} s")
            with contextlib.suppress(BlockingIOError):
                data += self._receive_some(min(count - len(data), 1 << 16))
        return bytes(data)

    def _receive_some(self, count: int) -> bytes:
        if not self.is_local:
            chunk = self._sock.recv(count)
        else:
            chunk, ancillary, flags, _ = self._sock.recvmsg(count, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    whole = len(content) - len(content) % array.array("i").itemsize
                    self._descriptors.extend(array.array("i", content[:whole]))
            if flags & socket.MSG_CTRUNC or len(self._descriptors) > MAX_DESCRIPTORS:
                raise PeerError(f"{self.peer} sent more file descriptors than a message may carry", peer=self.peer)
        if not chunk:
            raise ConnectionError("it closed the connection")
        return chunk
