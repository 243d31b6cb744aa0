"""The reader's end: loads of all peers, their results, and letting go of everything when our own KV cache goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torpor.connectors import link as links
from torpor.connectors.base import Finished, LoadRequest, PeerStats
from torpor.connectors.geometry import Geometry
from torpor.connectors.link import Link
from torpor.connectors.loads import Load, LoadState
from torpor.connectors.options import Options
from torpor.connectors.puller import Puller
from torpor.connectors.transport import Target, Transport
from torpor.errors import PeerError, RequestError, TransportError

logger = logging.getLogger(__name__)


class Reader:
    """All methods are the engine's thread's; none but ``release`` and ``close`` blocks."""

    def __init__(
        self,
        engine_id: str,
        ours: Geometry,
        transport: Transport,
        secret: bytes | None,
        options: Options,
        heartbeat_s: float,
        tell: Callable[[], None],
    ) -> None:
        """``tell`` is called, from any thread, when a load has come to ``take_finished``."""
        self._engine_id = engine_id
        self._ours = ours
        self._transport = transport
        self._secret = secret
        self._options = options
        self._heartbeat_s = heartbeat_s
        self._tell = tell
        self._pullers: dict[Target, Puller] = {}
        self._lock = threading.Lock()
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._in_flight: set[str] = set()
        self._counts = {LoadState.DONE: 0, LoadState.FAILED: 0}
        self._bytes = 0
        self._released = False

    @property
    def loads_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def loads_done(self) -> int:
        return self._counts[LoadState.DONE]

    @property
    def loads_failed(self) -> int:
        return self._counts[LoadState.FAILED]

    @property
    def bytes_received(self) -> int:
        return self._bytes

    def submit(self, request: LoadRequest) -> None:
        """Every request with local blocks comes back once, in ``take_finished``."""
        with self._lock:
            if request.local_block_ids:
                self._in_flight.add(request.request_id)
        try:
            load = Load(request)
            puller = self._puller_for(load.params.target)
        except (RequestError, PeerError) as error:
            self._fail(request, str(error))
        else:
            puller.submit(load)

    def cancel(self, request_id: str) -> None:
        for puller in self._pullers.values():
            puller.cancel(request_id)

    def take_finished(self) -> Finished:
        for puller in self._pullers.values():
            puller.prepare()
        with self._lock:
            finished = Finished(recving=frozenset(self._done), failed=frozenset(self._failed))
            self._done, self._failed = set(), set()
        return finished

    def release(self, deadline: float) -> None:
        """No load is left and no import is held when it returns, or a warning says of which peer one is: a read over a network
        that does not end. Nothing of that read can reach our KV cache any more. TransportError names peers whose memory our
        imports still hold."""
        self._released = True
        for puller in self._pullers.values():
            puller.stop()
        held = [p.target.engine_id for p in self._pullers.values() if not p.release(max(0.05, deadline - time.monotonic()))]
        with self._lock:
            # Complete, but nobody has taken note yet: what arrived goes with the memory.
            self._failed |= self._done
            self._done = set()
        if held and self._transport.imports_hold_memory:
            raise TransportError(f"the memory of {', '.join(held)} cannot be let go of", transport=self._transport.name)
        for engine_id in held:
            logger.warning("a read from engine %s does not end; it is cut off", engine_id)

    def admit(self) -> None:
        self._released = False
        for puller in self._pullers.values():
            puller.admit()

    def compute_with(self, ours: Geometry) -> None:
        """KV is of other weights from now on: owners are asked for that version. Called while released."""
        self._ours = ours

    def close(self, deadline: float) -> None:
        self._released = True
        for puller in self._pullers.values():
            puller.stop()
        for puller in self._pullers.values():
            puller.close(max(0.05, deadline - time.monotonic()))

    def peers(self) -> list[PeerStats]:
        alive = [puller.link for puller in self._pullers.values()]
        return [
            PeerStats(peer=str(link), direction="we read from it", epoch=str(link.epoch), leases=0, bytes=link.bytes)
            for link in alive
            if link is not None
        ]

    def _puller_for(self, target: Target) -> Puller:
        """PeerError says why nothing can be read from it now."""
        if self._released:
            raise PeerError("this engine's KV cache is released", peer=target.engine_id)
        puller = self._pullers.get(target)
        if puller is not None:
            return puller
        if len(self._pullers) >= self._options.max_peers and not self._evict_one():
            raise PeerError("it reads from too many peers (max_peers)", peer=target.engine_id)
        try:
            puller = Puller(target, self._connect, self._read, self._ended, self._begin)
        except RuntimeError as error:  # the system has no thread left
            raise PeerError(f"nobody can read from it: {error}", peer=target.engine_id) from error
        self._pullers[target] = puller
        return puller

    def _evict_one(self) -> bool:
        """Forgets the peer that has been idle longest."""
        idle = [puller for puller in self._pullers.values() if not puller.busy]
        if not idle:
            return False
        oldest = min(idle, key=lambda puller: (puller.link is not None, puller.idle_since))
        oldest.close(1.0)
        del self._pullers[oldest.target]
        return True

    def _connect(self, target: Target) -> Link:
        return links.connect(target, self._engine_id, self._ours, self._transport, self._secret, self._options, self._heartbeat_s)

    def _begin(self, link: Link, load: Load) -> bool:
        return link.begin(load, self._options.read_timeout_s)

    def _read(self, link: Link, load: Load) -> None:
        before = link.bytes
        link.read(load, self._ours, self._options.read_timeout_s)
        with self._lock:
            self._bytes += link.bytes - before

    def _ended(self, load: Load) -> None:
        self._report(load.request_id, load.state)

    def _fail(self, request: LoadRequest, reason: str) -> None:
        if request.local_block_ids:
            logger.warning("the KV of request %s is not loaded: %s", request.request_id, reason)
            self._report(request.request_id, LoadState.FAILED)

    def _report(self, request_id: str, state: LoadState) -> None:
        with self._lock:
            self._in_flight.discard(request_id)
            (self._done if state is LoadState.DONE else self._failed).add(request_id)
            self._counts[state] += 1
        self._tell()
