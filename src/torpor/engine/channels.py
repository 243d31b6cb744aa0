"""Two lines between a client and a core: a queue in one process, ZeroMQ between two."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable

import zmq

from torpor.engine.protocol import MAX_MESSAGE_BYTES, ToClient, ToCore, decode_to_core, encode

LINGER_MS = 2000  # how long a closing core waits for its last messages to be read
BATCH = 256  # messages taken in one go, so that a flood does not hold up the step


class QueueChannel:
    """In one process. ``deliver`` is called on the core's loop thread and must not block."""

    def __init__(self, deliver: Callable[[ToClient], None]) -> None:
        self._inbox: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()
        self._deliver = deliver
        self._closed = False

    def put(self, message: ToCore) -> None:
        """The client's end. Any thread."""
        self._inbox.put(message)

    def receive(self, timeout_s: float | None) -> list[ToCore]:
        messages: list[ToCore] = []
        try:
            first = self._inbox.get_nowait() if timeout_s == 0 else self._inbox.get(timeout=timeout_s)
            while True:
                if first is not None:
                    messages.append(first)
                if len(messages) >= BATCH:
                    break
                first = self._inbox.get_nowait()
        except queue.Empty:
            pass
        return messages

    def send(self, message: ToClient) -> None:
        self._deliver(message)

    def notify(self) -> None:
        self._inbox.put(None)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """The loop ends after its present step. Any thread."""
        self._closed = True
        self.notify()


class ZmqChannel:
    """The core's end of two one-way ``ipc://`` sockets that the client has bound in a folder of its own."""

    def __init__(self, requests: str, replies: str) -> None:
        self._context = zmq.Context()
        self._pull = self._socket(zmq.PULL, requests)
        self._push = self._socket(zmq.PUSH, replies)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._closed = False

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)  # no limit: send never blocks the step
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.connect(address)
        return socket

    def receive(self, timeout_s: float | None) -> list[ToCore]:
        timeout_ms = None if timeout_s is None else max(0, round(1000 * timeout_s))
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        messages: list[ToCore] = []
        while len(messages) < BATCH:
            try:
                messages.append(decode_to_core(self._pull.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return messages

    def send(self, message: ToClient) -> None:
        self._push.send(encode(message))

    def notify(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:  # full of wake-ups already
            pass
        except OSError:  # closed: there is no loop to wake
            pass

    @property
    def closed(self) -> bool:
        return self._closed

    def end(self) -> None:
        """The loop ends after its present step. Any thread, and signal handlers."""
        self._closed = True
        self.notify()

    def close(self) -> None:
        self._pull.close()
        self._push.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
