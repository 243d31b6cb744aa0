"""A client of LMCache's own server (``lm://host:port``) that gives up, as a remote storage plug-in of LMCache.

LMCache's own is not used (0.5.6, ``docs/design/connectors.md``): it waits for ever on a server that says nothing, and the
engine's step loop with it; it never connects again; and of two reads that meet on its connection one takes the other's answer:
the other returns shifted bytes with success.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import ClientCommand, ClientMetaMessage, ServerMetaMessage, ServerReturnCode
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

logger = logging.getLogger(__name__)

PLUGIN = "torpor"
RETRY_S = 5.0  # for so long after a failure nothing is asked of the server
SLACK_S = 0.1  # for a thread to wake


def settings_of(address: tuple[str, int], timeout_s: float) -> dict[str, Any]:
    """Fields of LMCache's configuration that make it use this client."""
    prefix = f"remote_storage_plugin.{PLUGIN}"
    return {
        "remote_storage_plugins": [PLUGIN],
        "extra_config": {
            f"{prefix}.module_path": __name__,
            f"{prefix}.class_name": ServerConnector.__name__,
            f"{prefix}.address": address,
            f"{prefix}.timeout_s": timeout_s,
        },
    }


class ServerConnector(RemoteConnector):  # type: ignore[misc]
    """Every coroutine runs on LMCache's storage loop and awaits nothing, so that no exchange is interrupted by another. Each ends
    within ``timeout_s``. OSError for one that failed; for a while after it nothing is there and nothing is kept."""

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any) -> None:
        """Connects with the first exchange: a server may come later than its engines."""
        super().__init__(config, local_cpu_backend.metadata)
        self._loop = loop
        self._local = local_cpu_backend
        prefix = f"remote_storage_plugin.{PLUGIN}"
        self._address: tuple[str, int] = config.extra_config[f"{prefix}.address"]
        self._timeout_s: float = config.extra_config[f"{prefix}.timeout_s"]
        self._socket: socket.socket | None = None
        self._failed_at = float("-inf")
        self._slow_at = float("-inf")
        self._failing = False

    async def exists(self, key: Any) -> bool:
        if self._paused:
            return False
        deadline = time.monotonic() + self._timeout_s
        with self._exchange(deadline) as line:
            line.sendall(_message(ClientCommand.EXIST, key))
            return bool(_answer(line, deadline).code == ServerReturnCode.SUCCESS)

    def exists_sync(self, key: Any) -> bool:
        return asyncio.run_coroutine_threadsafe(self.exists(key), self._loop).result()

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many of a prompt's leading chunks are there. The engine's step loop asks, so all of it takes ``timeout_s``, however
        many they are and however much waits to be written; where it takes longer, nothing is asked for a while. OSError."""
        if time.monotonic() - self._slow_at < RETRY_S:
            return 0
        deadline = time.monotonic() + self._timeout_s
        asked = asyncio.run_coroutine_threadsafe(self._leading(keys, deadline), self._loop)
        try:
            return asked.result(self._timeout_s + SLACK_S)
        except (TimeoutError, concurrent.futures.TimeoutError):
            if asked.done():
                raise
        asked.cancel()
        self._slow_at = time.monotonic()
        logger.warning("LMCache's server at %s is slow: prompts are not looked up there for %g s", self._address, RETRY_S)
        return 0

    async def _leading(self, keys: Sequence[Any], deadline: float) -> int:
        if self._paused or time.monotonic() > deadline:
            return 0
        with self._exchange(deadline) as line:
            for count, key in enumerate(keys):
                line.sendall(_message(ClientCommand.EXIST, key))
                if _answer(line, deadline).code != ServerReturnCode.SUCCESS:
                    return count
        return len(keys)

    async def get(self, key: Any) -> Any:
        """None: it is not there, or there is no room for it here."""
        if self._paused:
            return None
        deadline = time.monotonic() + self._timeout_s
        with self._exchange(deadline) as line:
            line.sendall(_message(ClientCommand.GET, key))
            answer = _answer(line, deadline)
            if answer.code != ServerReturnCode.SUCCESS:
                return None
            if answer.length != self.full_chunk_size_bytes or answer.shape != self.meta_shapes[0]:
                raise ConnectionError(f"the server has a chunk of {answer.length} bytes, {tuple(answer.shape)}: not one of ours")
            found = self._local.allocate(answer.shape, answer.dtype, answer.fmt)
            room = memoryview(bytearray(answer.length)) if found is None else memoryview(found.byte_array)
            try:
                _receive(line, room, deadline)
            except BaseException:
                if found is not None:
                    found.ref_count_down()
                raise
            return found

    async def put(self, key: Any, memory_obj: Any) -> None:
        if self._paused:
            return
        content = memory_obj.byte_array
        with self._exchange(time.monotonic() + self._timeout_s) as line:
            shape, dtype, fmt = memory_obj.get_shape(), memory_obj.get_dtype(), memory_obj.get_memory_format()
            line.sendall(ClientMetaMessage(ClientCommand.PUT, key, len(content), fmt, dtype, shape).serialize())
            line.sendall(content)

    async def list(self) -> list[str]:
        raise NotImplementedError("LMCache's server does not list")

    async def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def _paused(self) -> bool:
        return time.monotonic() - self._failed_at < RETRY_S

    @contextlib.contextmanager
    def _exchange(self, deadline: float) -> Iterator[socket.socket]:
        """The connection, for an exchange that has to be over by then. One that failed half way leaves no connection: what came
        next would be the rest of another answer."""
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, timeout=_left(deadline))
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(_left(deadline))
            yield self._socket
        except BaseException as error:
            self._give_up(error)
            raise
        self._failing = False

    def _give_up(self, error: BaseException) -> None:
        self._failed_at = time.monotonic()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if not self._failing:
            self._failing = True
            logger.error("LMCache's server at %s is passed over: %s: %s", self._address, type(error).__name__, error)


def _message(command: Any, key: Any) -> bytes:
    nothing = torch.Size([0, 0, 0, 0])
    return bytes(ClientMetaMessage(command, key, 0, MemoryFormat(1), torch.float16, nothing).serialize())


def _answer(line: socket.socket, deadline: float) -> Any:
    head = memoryview(bytearray(ServerMetaMessage.packlength()))
    _receive(line, head, deadline)
    try:
        return ServerMetaMessage.deserialize(bytes(head))
    except (ValueError, KeyError) as error:
        raise ConnectionError(f"that is no answer of LMCache's server: {error}") from error


def _receive(line: socket.socket, room: memoryview, deadline: float) -> None:
    """Fills ``room``."""
    room = room.cast("B")
    while len(room):
        line.settimeout(_left(deadline))
        count = line.recv_into(room)
        if count == 0:
            raise ConnectionError("the server closed the connection")
        room = room[count:]


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
