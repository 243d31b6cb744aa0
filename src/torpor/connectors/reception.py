"""Accepts connections and gives each a guest; a peer that talks nonsense or nothing costs one thread for a few seconds and
nothing else."""

from __future__ import annotations

import logging
import socket
import threading

from torpor.connectors.channel import Channel
from torpor.connectors.doors import Credentials, Door
from torpor.connectors.guest import Guest
from torpor.connectors.owner import Owner
from torpor.errors import TransportError

logger = logging.getLogger(__name__)

ACCEPT_S = 0.2
TIRED_S = 0.2  # after an error of the listener itself, such as no free descriptors


class Reception:
    """One thread. ``close`` is idempotent."""

    def __init__(self, door: Door, owner: Owner, io_timeout_s: float) -> None:
        """io_timeout_s: how long a frame may take once it has begun."""
        self._door = door
        self._io_timeout_s = io_timeout_s
        self._owner = owner
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torpor-kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                came = self._door.accept(ACCEPT_S)
            except TransportError as error:
                logger.error("%s", error)
                self._closing.wait(TIRED_S)
                continue
            if came is not None:
                self._receive(*came)
        self._door.close()

    def _receive(self, sock: socket.socket, credentials: Credentials | None) -> None:
        try:
            where = f"pid {credentials.pid}" if credentials is not None else ":".join(map(str, sock.getpeername()[:2]))
        except OSError:
            sock.close()
            return
        channel = Channel(sock, where, io_timeout_s=self._io_timeout_s)
        guest = Guest(self._owner, channel, credentials)
        if self._owner.enter(guest):
            guest.start()
        else:
            logger.info("turned %s away: closing", where)
            channel.close()
