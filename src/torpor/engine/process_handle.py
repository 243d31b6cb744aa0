"""The client's handle on a core process: starts it, reads from it, notices its death, ends it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from torpor.engine.config import EngineConfig
from torpor.engine.protocol import MAX_MESSAGE_BYTES, ToClient, ToCore, decode_to_client, encode
from torpor.errors import EngineDeadError, TorporError

END_S = 10.0  # from the end of its input to SIGKILL
DRAIN_MS = 200  # for messages that a dead core has sent
MAX_PATH = 90  # of a Unix socket: the kernel's limit is 107


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """What the core process reads from its standard input, after four bytes of length. The pipe then stays open for the client's
    life: its end means that the client is gone."""

    config: EngineConfig
    folder: str  # of the two sockets
    requests: str  # their addresses
    replies: str
    life_fd: int  # inherited, held by the core: its end means that the core is gone
    log_level: int


class CoreProcess:
    """Starts the process in its constructor and a thread that reads from it. ``on_message`` and ``on_death`` are called on
    that thread, the latter once, last, and not after ``close``."""

    def __init__(
        self, config: EngineConfig, *, on_message: Callable[[ToClient], None], on_death: Callable[[TorporError], None]
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._closing = False
        self._closed = False
        self._send_lock = threading.Lock()
        self._folder = private_folder()
        self._context = zmq.Context()
        self._push = self._bind(zmq.PUSH, "requests")
        self._pull = self._bind(zmq.PULL, "replies")
        self._life_read, life_write = os.pipe()
        try:
            self._process = self._spawn(config, life_write)
        except BaseException:
            self._release()
            raise
        finally:
            os.close(life_write)
        self._reader = threading.Thread(target=self._read, name="torpor-core-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def worked_s(self) -> float | None:
        """Processor time of the core, over all its threads; None once it has ended."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def send(self, message: ToCore) -> None:
        """Never blocks. To a core that has died nothing is sent; ``on_death`` tells."""
        with self._send_lock:
            if self._closed:
                return
            try:
                self._push.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:  # nobody at the other end
                return

    def close(self, *, kill: bool = False) -> None:
        """Ends the core if it has not ended and gives everything back. Blocks; a core that does not end by itself, or with
        ``kill``, is killed. Idempotent."""
        self._closing = True
        if kill:
            self._process.kill()
        self._end()
        self._reader.join()
        with self._send_lock:
            if self._closed:
                return
            self._closed = True
        self._release()

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.bind(self._address(name))
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    def _spawn(self, config: EngineConfig, life_fd: int) -> subprocess.Popen[bytes]:
        bootstrap = Bootstrap(
            config=config,
            folder=str(self._folder),
            requests=self._address("requests"),
            replies=self._address("replies"),
            life_fd=life_fd,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        data = msgspec.msgpack.encode(bootstrap)
        command = [sys.executable, "-m", "torpor.engine.process"]
        # What libraries print goes to standard error: standard output belongs to the program that we are part of.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=[life_fd])
        assert process.stdin is not None
        try:
            process.stdin.write(struct.pack("<I", len(data)) + data)
            process.stdin.flush()
        except BrokenPipeError:  # it died at once: the reader will say so
            pass
        return process

    def _read(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._life_read, zmq.POLLIN)
        while self._life_read not in dict(poller.poll()):
            self._receive()
        while self._pull.poll(DRAIN_MS):
            self._receive()
        status = self._process.wait()
        if not self._closing:
            self._on_death(EngineDeadError(f"the engine core (pid {self.pid}) {exit_text(status)}", exit_status=status))

    def _receive(self) -> None:
        while True:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(decode_to_client(data))

    def _end(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()  # the core takes it as our death, and ends by itself
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _release(self) -> None:
        self._push.close()
        self._pull.close()
        self._context.term()
        os.close(self._life_read)
        shutil.rmtree(self._folder, ignore_errors=True)


def private_folder() -> Path:
    """A new folder of mode 0700, with a path short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="torpor-")
    if len(folder) > MAX_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="torpor-", dir="/tmp")
    return Path(folder)


def exit_text(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
