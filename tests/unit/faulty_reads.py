"""Faults in what is read, and from whom."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from faulty_parts import FaultyIpc, FaultyPinned

from torpor.connectors.base import ConnectorMetadata, Finished, KVConnectorWorker
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.doors import Credentials
from torpor.connectors.ipc import IpcTransport
from torpor.connectors.options import Options
from torpor.connectors.scheduler import PullScheduler
from torpor.connectors.transport import BlockRead, RemoteMemory
from torpor.connectors.worker import PullWorker
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.request import GenerationRequest
from torpor.testing.connectors.pinned import PinnedRemote, PinnedTransport


class PrefixBlindScheduler(PullScheduler):
    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        self._loads = [msgspec.structs.replace(load, first_block=0) for load in self._loads]


class PrefixBlind(FaultyPinned):
    """Reads a request's blocks from its first one, also where a prefix is there already."""

    scheduler = PrefixBlindScheduler


class CredulousScheduler(PullScheduler):
    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        return


class Credulous(FaultyPinned):
    """Believes any ``kv_transfer_params``."""

    scheduler = CredulousScheduler


class ModelBlind(FaultyPinned):
    """Takes the KV of any model whose cache has the same shape."""

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        return super().create_worker(config, dataclasses.replace(spec, model_id="any"))


class AnyModelWorker(PullWorker):
    def register_kv_caches(self, kv_caches: Any, spec: KVCacheSpec, memory: Any) -> None:
        super().register_kv_caches(kv_caches, dataclasses.replace(spec, model_id="any"), memory)


ModelBlind.worker = AnyModelWorker


class RememberingTransport(PinnedTransport):
    """Has bytes that it read before its own release, and gives them for the same blocks of the same registration after it."""

    def __init__(self, config: ConnectorConfig, options: Options) -> None:
        super().__init__(config, options)
        self.read_before: dict[Any, bytes] = {}
        self.stale: dict[Any, bytes] = {}

    def attach(self, *args: Any) -> RemoteMemory:
        remote = super().attach(*args)
        assert isinstance(remote, PinnedRemote)
        # The regions themselves, which the keys keep: a later registration can have the id of one that is gone.
        plain, registration = remote._at, tuple(remote._regions)

        def at(address: int, nbytes: int) -> bytes:
            found = self.stale.get((registration, address)) or plain(address, nbytes)
            self.read_before[registration, address] = found
            return found

        remote._at = at  # type: ignore[method-assign]
        return remote


class RememberingWorker(PullWorker):
    def release_kv_caches(self) -> None:
        super().release_kv_caches()
        self._transport.stale = dict(self._transport.read_before)  # type: ignore[attr-defined]


class OldBytes(FaultyPinned):
    """Its staging survives its engine's sleep."""

    transport, worker = RememberingTransport, RememberingWorker


class OptimistWorker(PullWorker):
    """Takes what was under way at a release for done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.under_way: set[str] = set()
        self.given_up: set[str] = set()

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        self.under_way |= {load.request_id for load in metadata.loads if load.local_block_ids}
        super().start_load_kv(metadata)

    def release_kv_caches(self) -> None:
        self.given_up |= self.under_way
        super().release_kv_caches()

    def get_finished(self) -> Finished:
        found = super().get_finished()
        wrong = found.failed & self.given_up
        self.under_way -= found.recving | found.failed
        return dataclasses.replace(found, recving=found.recving | wrong, failed=found.failed - wrong)


class Optimist(FaultyPinned):
    worker = OptimistWorker


class DreamerWorker(PullWorker):
    """Takes "asleep" for an answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asleep: set[str] = set()

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        for load in metadata.loads:
            if load.params["remote_engine_id"] not in PinnedTransport.owners:
                self.asleep.add(load.request_id)
        super().start_load_kv(metadata)

    def get_finished(self) -> Finished:
        found = super().get_finished()
        wrong = found.failed & self.asleep
        return dataclasses.replace(found, recving=found.recving | wrong, failed=found.failed - wrong)


class Dreamer(FaultyPinned):
    worker = DreamerWorker


class TalkativeWorker(PullWorker):
    """Reports of every request, also of one that loads nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: set[str] = set()

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        self.told |= {load.request_id for load in metadata.loads if not load.local_block_ids}
        super().start_load_kv(metadata)

    def get_finished(self) -> Finished:
        found, told = super().get_finished(), frozenset(self.told)
        self.told.clear()
        return dataclasses.replace(found, recving=found.recving | told)


class Talkative(FaultyPinned):
    worker = TalkativeWorker


class MiserlyWorker(PullWorker):
    """Keeps the blocks of hand-offs that a peer has read."""

    def get_finished(self) -> Finished:
        return dataclasses.replace(super().get_finished(), sending=frozenset())


class Miserly(FaultyPinned):
    worker = MiserlyWorker


class ForgivingWorker(PullWorker):
    def register_kv_caches(self, kv_caches: Any, spec: KVCacheSpec, memory: Any) -> None:
        super().register_kv_caches(kv_caches, spec, memory)
        self._fence.end = lambda lease: None  # type: ignore[method-assign, union-attr]


class Forgiving(FaultyPinned):
    """Frees the blocks when a lease has passed, and lets its reader in all the same."""

    worker = ForgivingWorker


class UnstoppableTransport(PinnedTransport):
    def attach(self, *args: Any) -> RemoteMemory:
        remote = super().attach(*args)
        plain = remote.read

        def read(request: BlockRead, confirm: Callable[[], None]) -> int:
            deaf = msgspec.structs.replace(request, stop=lambda: False, writing=_slowly)
            return plain(deaf, confirm)

        remote.read = read  # type: ignore[method-assign]
        return remote


@contextlib.contextmanager
def _slowly() -> Iterator[None]:
    time.sleep(0.02)
    yield


class Unstoppable(FaultyPinned):
    """Says of a load that was cancelled that it has ended, and goes on with it."""

    transport = UnstoppableTransport


class SameEpochWorker(PullWorker):
    def restore_kv_caches(self) -> None:
        if not self._registered and self._epoch is not None:
            self._publish(self._epoch)


class SameEpoch(FaultyPinned):
    """A new mapping has the old one's epoch."""

    worker = SameEpochWorker


class MournfulTransport(IpcTransport):
    def lets_go(self, credentials: Credentials | None) -> bool:
        return False


class Mournful(FaultyIpc):
    """Waits for a peer that died to let go."""

    transport = MournfulTransport


class PatientWorker(PullWorker):
    def _deadline(self) -> float:
        return super()._deadline() + 3600


class Patient(FaultyIpc):
    """Waits for a peer that says nothing as long as it takes."""

    worker = PatientWorker
