"""LMCache's P/D backend (0.5.6, ``PDBackend``), with an end to every wait and to every chunk. Imported when the mode is used.

A sender asks the receiver for room, by ZeroMQ, and writes chunks there through NIXL, from one staging buffer to another. What of
LMCache's own is replaced, and why, all run (``docs/design/connectors.md``):
- The receiver shows a chunk before its bytes are there, keeps one that never comes for ever, and tells the next sender that it
  has it. Here chunks prove themselves (``lmcache_chunks``), those that cannot are asked for again, and the oldest give way.
- A receiver without room waits, in the thread that answers everybody. Here it is said that nothing needs to be sent.
- One message that a receiver cannot read, such as another version's, and it answers nobody any more.
- The sender waits for ever for a receiver that says nothing, and loses memory with every push that fails.
- Neither can be closed: their threads wait for messages.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import zmq
from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.pd_backend import AllocRequest, AllocResponse, PDBackend
from lmcache.v1.transfer_channel.transfer_utils import P2PInitSideMsg

from torpor.connectors import nixl_agent
from torpor.connectors.lmcache_chunks import Chunks
from torpor.connectors.lmcache_options import Peer
from torpor.errors import ConfigurationError, ConnectorError, TransportError

JOIN_S = 5.0
NAME_BYTES = 32
MODEL = "torpor"  # in keys: what tells models apart is in the names of blocks

_kept: list[Any] = []  # with a write in flight: an agent that is destroyed then can kill the process it writes to


class Backend(PDBackend):  # type: ignore[misc]
    """What both ends share. ``fields``: of LMCache's configuration and metadata."""

    def __init__(self, config: Any, metadata: Any, chunks: Chunks, peer: Peer) -> None:
        self._chunks = chunks
        self._peer = peer
        with _nixl_as_lmcache_knows_it():
            super().__init__(config, metadata)

    @property
    def _allocator(self) -> Any:
        both = self.memory_allocator
        return both.cpu_allocator if self.corrected_device == "cpu" else both.gpu_allocator

    def key(self, name: bytes) -> Any:
        return CacheEngineKey(MODEL, 1, 0, int.from_bytes(name, "big"), self._chunks.dtype)

    def _end(self, sockets: Sequence[Any]) -> None:
        """Threads have been told to end."""
        self._nixl_queue.put(None)
        threads = [*self.running_threads, *self.transfer_channel.running_threads]
        deadline = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            _kept.append(self.transfer_channel)
            return
        for each in sockets:
            each.close(0)
        for page in self._allocator.free_blocks:  # each would be logged as lost
            page.invalidate()
        channel = self.transfer_channel
        with contextlib.suppress(Exception):
            channel.nixl_agent.release_dlist_handle(channel.nixl_wrapper.xfer_handler)
            for handles in channel.remote_xfer_handlers_dict.values():
                channel.nixl_agent.release_dlist_handle(handles)
            channel.nixl_agent.deregister_memory(channel.nixl_wrapper.reg_descs)


class Sender(Backend):
    """``take`` and ``push`` are each one thread's."""

    def __init__(self, config: Any, metadata: Any, chunks: Chunks, peer: Peer, answer_s: float) -> None:
        super().__init__(config, metadata, chunks, peer)
        self._answer_s = answer_s
        self._written: concurrent.futures.Future[int] | None = None
        # LMCache's sockets have no time limit, and it takes them from here.
        self._patience = zmq.Context()
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            self._patience.setsockopt(option, int(1000 * answer_s))
        self._patience.setsockopt(zmq.LINGER, 0)
        self.zmq_context = self.transfer_channel.zmq_context = self._patience
        ranks = config.pd_peer_init_port, config.pd_peer_alloc_port  # one port for every rank that LMCache thinks there is
        self._spec = SimpleNamespace(
            req_id="torpor",
            receiver_host=peer.host,
            receiver_init_port=ranks[0],
            receiver_alloc_port=ranks[1],
            is_last_prefill=False,
        )

    def take(self, count: int) -> list[Any] | None:
        """Chunks of the staging buffer; None when it has not so many free."""
        found: list[Any] | None = self.batched_allocate(self._chunks.shape, self._chunks.dtype, count)
        return found

    def push(self, names: Sequence[bytes], chunks: Sequence[Any]) -> None:
        """Ends when the receiver has them, ``answer_s`` later at the most per answer. They are the caller's to give back.
        TransportError."""
        if self._written is not None and not self._written.done():
            raise TransportError(f"{self._peer.host} has not taken what was written to it before", transport="lmcache")
        keys = [self.key(name) for name in names]
        try:
            [self._written] = self.batched_submit_put_task(keys, list(chunks), transfer_spec=self._spec)
        except Exception as error:
            for chunk in chunks:  # LMCache took a reference to each, and has forgotten it
                chunk.ref_count_down()
            self._forget()
            raise self._failed(error) from error
        try:
            self._written.result(self._answer_s)
        except concurrent.futures.TimeoutError as error:
            raise self._failed(error) from error
        except Exception as error:
            self._forget()
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> TransportError:
        where = f"{self._peer.host}:{self._peer.init_port}"
        return TransportError(f"LMCache cannot push to {where}: {type(error).__name__}: {error}", transport="lmcache")

    def _forget(self) -> None:
        """What is known of the receiver: it may have begun anew."""
        label = self._peer.label
        self.initialized_peers.discard(label)
        self.transfer_channel.remote_xfer_handlers_dict.pop(label, None)
        asked = self.mem_alloc_sockets.pop(label, None)
        if asked is not None:
            asked.close(0)

    def close(self) -> None:
        self.running = self.transfer_channel.running = False
        self._end(list(self.mem_alloc_sockets.values()))
        self._patience.destroy(linger=0)


class Answering:
    """LMCache's end of questions and answers. Where its loop answers one with an exception, nothing else could be asked: ZeroMQ
    waits for the answer. An empty one goes out then, which no sender takes for anything."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def recv(self) -> Any:
        while True:
            try:
                return self._inner.recv()
            except zmq.ZMQError as error:
                if error.errno != zmq.EFSM:
                    raise
                self._inner.send(b"")

    def send(self, answer: bytes) -> None:
        self._inner.send(answer)


class Receiver(Backend):
    """Chunks come in on LMCache's threads; ``copy_of`` and ``drop`` are anybody's."""

    alloc_side_channel: Any

    def __init__(self, config: Any, metadata: Any, chunks: Chunks, peer: Peer) -> None:
        """ConfigurationError when something else listens there."""
        for port in (peer.init_port, peer.alloc_port):
            _check_free(peer.host, port)
        super().__init__(config, metadata, chunks, peer)
        self.alloc_side_channel = Answering(self.alloc_side_channel)
        channel, deadline = self.transfer_channel, time.monotonic() + JOIN_S
        while not channel.side_channels:  # its thread makes it
            if time.monotonic() > deadline:
                raise RuntimeError(f"it does not listen at {peer.host}:{peer.init_port}")
            time.sleep(0.001)
        channel.init_side_channel = Answering(channel.init_side_channel)

    def holds(self, name: bytes) -> bool:
        """There is room for it at least."""
        with self.data_lock:
            return self.key(name) in self.data

    def copy_of(self, name: bytes) -> torch.Tensor | None:
        """A copy, which nobody writes to; None unless it proves to be whole and of that name."""
        with self.data_lock:
            held = self.data.get(self.key(name))
            copied = None if held is None else held.tensor.clone()
        return copied if copied is not None and self._chunks.proves(copied, name) else None

    def drop(self, names: Sequence[bytes]) -> None:
        with self.data_lock:
            dropped = [self.data.pop(self.key(name), None) for name in names]
        for held in dropped:
            if held is not None:
                held.ref_count_down()

    def drop_all(self) -> None:
        with self.data_lock:
            held = list(self.data.values())
            self.data.clear()
        for each in held:
            each.ref_count_down()

    def _allocate_and_put(self, request: Any) -> Any:
        """In LMCache's place: room for every key that is not here and whole. Never raises: the sender waits for an answer."""
        if tuple(request.shape) == tuple(self._chunks.shape) and len(request.keys) <= self._pages:
            with contextlib.suppress(ValueError, OverflowError, KeyError, IndexError):  # keys of somebody else's
                return self._room_for([CacheEngineKey.from_string(text) for text in request.keys])
        return AllocResponse(already_sent_indexes=list(range(len(request.keys))), remote_indexes=[])

    def _room_for(self, keys: Sequence[Any]) -> Any:
        here = {index for index, key in enumerate(keys) if self.copy_of(key.chunk_hash.to_bytes(NAME_BYTES, "big")) is not None}
        with self.data_lock:
            for index in here:  # asked for just now: others give way first
                if keys[index] in self.data:
                    self.data[keys[index]] = self.data.pop(keys[index])
            places = [self._place(key) for index, key in enumerate(keys) if index not in here]
        return AllocResponse(already_sent_indexes=sorted(here), remote_indexes=places)

    @property
    def _pages(self) -> int:
        return int(self.pd_config.buffer_size) // self._chunks.nbytes

    def _place(self, key: Any) -> int:
        """Of the key's chunk: the one it has, a free one, or that of the oldest. A late write to a chunk that has changed hands
        shows in its seal."""
        held = self.data.pop(key, None)
        while held is None and (held := self.allocate(self._chunks.shape, self._chunks.dtype)) is None:
            self.data.pop(next(iter(self.data))).ref_count_down()
        self.data[key] = held
        return int(held.meta.address)

    def close(self) -> None:
        self.running = self.transfer_channel.running = False
        empty = AllocRequest(keys=[], fmt=1, shape=[], dtype="float", last_chunk_toks=0)
        for port, message in ((self._peer.alloc_port, empty), (self._peer.init_port, P2PInitSideMsg())):
            _wake(self._peer.host, port, msgspec.msgpack.encode(message))
        self.drop_all()
        self._end([*self.side_channels, *self.transfer_channel.side_channels])


def _wake(host: str, port: int, message: bytes) -> None:
    """A thread that waits for messages there sees that it is to end."""
    with zmq.Context() as context, context.socket(zmq.REQ) as asked:
        asked.setsockopt(zmq.LINGER, 0)
        asked.setsockopt(zmq.RCVTIMEO, int(1000 * JOIN_S / 2))
        with contextlib.suppress(zmq.ZMQError):
            asked.connect(f"tcp://{host}:{port}")
            asked.send(message)
            asked.recv()


def _check_free(host: str, port: int) -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigurationError(
            f"lmcache: nothing can listen at {host}:{port}: {error.strerror}", setting="pd_peer", value=f"{host}:{port}"
        ) from error


@contextlib.contextmanager
def _nixl_as_lmcache_knows_it() -> Iterator[None]:
    """LMCache imports ``nixl``, a wheel that ``torpor[nixl]`` does not bring: it depends on those for all versions of CUDA."""
    try:
        package = nixl_agent.load_package()
    except ConnectorError as error:
        raise ConnectorError(
            f"lmcache's P/D mode needs NIXL: pip install 'torpor[nixl]' ({error})", connector="lmcache", setting="pd_peer"
        ) from error
    api = sys.modules[package.nixl_agent.__module__]
    undo: Callable[[], object] = lambda: None  # noqa: E731
    if "nixl._api" not in sys.modules:
        sys.modules["nixl._api"] = api
        undo = lambda: sys.modules.pop("nixl._api", None)  # noqa: E731
    try:
        with nixl_agent.patient_progress(package):
            yield
    finally:
        undo()
