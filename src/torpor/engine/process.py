"""The core process: ``python -m torpor.engine.process``, started by a client and by nobody else.

Ends when the client says so, when the client is gone (its end of the standard input closes), or when the core cannot go on.
SIGINT and SIGTERM are the client's to obey: a terminal, and a supervisor that stops all processes of a service, send them to
both, and the client lets requests end first.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # before the imports, which take a while
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import contextlib
import faulthandler
import logging
import os
import shutil
import struct
import sys
import threading
from typing import Any, BinaryIO

import msgspec

from torpor.engine import collector
from torpor.engine.bytecode import keep_bytecode
from torpor.engine.channels import ZmqChannel
from torpor.engine.client import core_factory
from torpor.engine.core import EngineCore
from torpor.engine.loop import CoreFactory, CoreLoop
from torpor.engine.process_handle import Bootstrap

ORPHAN_S = 5.0  # how long a core without a client may take to put its things away
EXIT_FAILED, EXIT_ORPHAN = 1, 3


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # not SIG_IGN, which a child process would inherit
    faulthandler.enable()
    stdin = sys.stdin.buffer
    bootstrap = read_bootstrap(stdin)
    os.set_inheritable(bootstrap.life_fd, False)
    with contextlib.suppress(RuntimeError):  # no home folder
        keep_bytecode(bootstrap.config.model.cache_folder)
    logging.basicConfig(
        level=bootstrap.log_level, format="%(asctime)s core %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    channel = ZmqChannel(bootstrap.requests, bootstrap.replies)
    ended = threading.Event()
    watched = (stdin, channel, bootstrap.folder, ended)
    threading.Thread(target=_watch_client, args=watched, name="torpor-watch", daemon=True).start()
    error = CoreLoop(settled(core_factory(bootstrap.config)), channel).run()
    ended.set()
    channel.close()
    return 0 if error is None else EXIT_FAILED


def settled(factory: CoreFactory) -> CoreFactory:
    """Keeps the garbage collector from what stays for ever: looking through it is 0.2 s in which a serving core does not step."""

    def make(**callbacks: Any) -> EngineCore:
        core = factory(**callbacks)
        collector.settle()
        return core

    return make


def read_bootstrap(stream: BinaryIO) -> Bootstrap:
    (length,) = struct.unpack("<I", stream.read(4))
    return msgspec.msgpack.decode(stream.read(length), type=Bootstrap)


def _watch_client(stdin: BinaryIO, channel: ZmqChannel, folder: str, ended: threading.Event) -> None:
    """Waits for the end of the client. A core that is busy (loading, in a step) and does not end by itself is ended."""
    while os.read(stdin.fileno(), 4096):
        pass
    if ended.is_set():
        return
    shutil.rmtree(folder, ignore_errors=True)  # a client that was killed could not
    channel.end()
    if not ended.wait(ORPHAN_S):
        os._exit(EXIT_ORPHAN)


if __name__ == "__main__":
    sys.exit(main())
