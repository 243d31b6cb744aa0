"""Connectors with one deliberate fault each, and the item of the conformance suite that must catch it. Nothing else may."""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torpor.connectors.base import ConnectorMetadata, Finished, KVConnector, KVConnectorScheduler, KVConnectorWorker
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.doors import Credentials
from torpor.connectors.ipc import IpcConnector, IpcTransport
from torpor.connectors.multi import MultiConnector
from torpor.connectors.options import Options
from torpor.connectors.scheduler import PullScheduler
from torpor.connectors.transport import Publication, RemoteMemory
from torpor.connectors.worker import PullWorker
from torpor.errors import StateError
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.request import GenerationRequest
from torpor.testing.connectors import PinnedConnector
from torpor.testing.connectors.pinned import PinnedRemote, PinnedTransport


class FaultyPinned(PinnedConnector):
    """``worker``, ``transport`` and ``scheduler`` are what it is made of."""

    worker: ClassVar[type[PullWorker]] = PullWorker
    transport: ClassVar[type[PinnedTransport]] = PinnedTransport
    scheduler: ClassVar[type[PullScheduler]] = PullScheduler

    @classmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler:
        return cls.scheduler(config, spec)

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"socket_dir"})
        return cls.worker(config, spec, cls.transport(config, options), options)


# ---- E4 ----------------------------------------------------------------------------------------------------------------------


class SpeaksForItsChildren(MultiConnector):
    """Declares that it follows a sleep, whatever its children say."""

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        kind = super().configured(config)
        kind.supports_sleep_mode = True
        return kind


# ---- what is read ------------------------------------------------------------------------------------------------------------


class PrefixBlindScheduler(PullScheduler):
    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        self._loads = [dataclasses.replace(load, first_block=0) for load in self._loads]


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
        plain, registration = remote._at, tuple(id(region) for region in remote._regions)

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


class SameEpochWorker(PullWorker):
    def restore_kv_caches(self) -> None:
        if not self._registered and self._epoch is not None:
            self._publish(self._epoch)


class SameEpoch(FaultyPinned):
    """A new mapping has the old one's epoch."""

    worker = SameEpochWorker


# ---- peers -------------------------------------------------------------------------------------------------------------------


class FaultyIpc(IpcConnector):
    worker: ClassVar[type[PullWorker]] = PullWorker
    transport: ClassVar[type[IpcTransport]] = IpcTransport

    @classmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker:
        options = Options.of(config, known={"socket_dir"})
        return cls.worker(config, spec, cls.transport(config, options), options)


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


# ---- moves -------------------------------------------------------------------------------------------------------------------


class OnceOnlyWorker(PullWorker):
    def release_kv_caches(self) -> None:
        if not self._may_be_held:
            raise StateError("released already", state="released")
        super().release_kv_caches()


class OnceOnly(FaultyPinned):
    """A second release is an error."""

    worker = OnceOnlyWorker


class SulkingWorker(PullWorker):
    def _serve_again(self) -> tuple[str, ...]:
        self._registered = False
        return ()


class Sulking(FaultyPinned):
    """After a release that failed it serves nobody."""

    worker = SulkingWorker


class OneTryWorker(PullWorker):
    tried = False

    def release_kv_caches(self) -> None:
        self.tried = False
        super().release_kv_caches()

    def restore_kv_caches(self) -> None:
        if not self.tried:
            self.tried = True
            super().restore_kv_caches()


class OneTry(FaultyPinned):
    """A restore that failed is not tried again."""

    worker = OneTryWorker


class EarlyBirdWorker(PullWorker):
    def register_kv_caches(self, kv_caches: Any, spec: KVCacheSpec, memory: Any) -> None:
        super().register_kv_caches(kv_caches, spec, memory)
        self._early = memory.register_tag_hooks("weights", after_map=self.restore_kv_caches, name="early bird")

    def shutdown(self) -> None:
        self.__dict__.pop("_early", lambda: None)()
        super().shutdown()


class EarlyBird(FaultyPinned):
    """Comes back with whichever pool wakes first."""

    worker = EarlyBirdWorker


class ClingingWorker(PullWorker):
    def register_kv_caches(self, kv_caches: Any, spec: KVCacheSpec, memory: Any) -> None:
        super().register_kv_caches(kv_caches, spec, memory)
        memory.register_tag_hooks("kv_cache", before_unmap=lambda: None, name="clinging")


class Clinging(FaultyPinned):
    """Subscribes to the mapping by itself, and never unsubscribes."""

    worker = ClingingWorker


class GreedyWorker(PullWorker):
    def register_kv_caches(self, kv_caches: Any, spec: KVCacheSpec, memory: Any) -> None:
        import torch

        self._scratch = memory.pool("scratch").empty((4096,), dtype=torch.uint8)
        super().register_kv_caches(kv_caches, spec, memory)

    def shutdown(self) -> None:
        self.__dict__.pop("_scratch", None)
        super().shutdown()


class Greedy(FaultyPinned):
    """Has a buffer in a pool that sleeps."""

    worker = GreedyWorker


# ---- what grows --------------------------------------------------------------------------------------------------------------


class HoardingWorker(PullWorker):
    """Keeps something of every registration until it is shut down."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hoard: list[Any] = []

    def keep(self) -> None:
        raise NotImplementedError

    def let_go(self, thing: Any) -> None:
        return

    def restore_kv_caches(self) -> None:
        if not self._registered:
            self.keep()
        super().restore_kv_caches()

    def shutdown(self) -> None:
        super().shutdown()
        while self.hoard:
            self.let_go(self.hoard.pop())


class MappingsWorker(HoardingWorker):
    def keep(self) -> None:
        fd = os.memfd_create("hoard")
        os.ftruncate(fd, 1 << 16)
        self.hoard.append(mmap.mmap(fd, 1 << 16))
        os.close(fd)


class KeepsMappings(FaultyPinned):
    worker = MappingsWorker


class BytesWorker(HoardingWorker):
    def keep(self) -> None:
        self.hoard.append(b"\x01" * (2 << 20))


class KeepsBytes(FaultyPinned):
    worker = BytesWorker


class DescriptorsWorker(HoardingWorker):
    def keep(self) -> None:
        self.hoard.append(os.open("/dev/null", os.O_RDONLY))

    def let_go(self, thing: Any) -> None:
        os.close(thing)


class KeepsDescriptors(FaultyPinned):
    worker = DescriptorsWorker


class ThreadsWorker(HoardingWorker):
    def keep(self) -> None:
        ended = threading.Event()
        threading.Thread(target=ended.wait, daemon=True).start()
        self.hoard.append(ended)

    def let_go(self, thing: Any) -> None:
        thing.set()


class KeepsThreads(FaultyPinned):
    worker = ThreadsWorker


class KeepsImportsTransport(IpcTransport):
    """A reader that keeps a second import of every owner until it is closed."""

    def __init__(self, config: ConnectorConfig, options: Options) -> None:
        super().__init__(config, options)
        self._second: list[RemoteMemory] = []

    def attach(self, *args: Any) -> RemoteMemory:
        if not self._second:
            self._second.append(super().attach(*args))
        return super().attach(*args)

    def publish(self) -> Publication:
        return super().publish()

    def close(self) -> None:
        while self._second:
            self._second.pop().close()
        super().close()


class KeepsImports(FaultyIpc):
    transport = KeepsImportsTransport


@dataclass(frozen=True)
class Mutant:
    kind: type[KVConnector]
    item: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kind.__name__


CHILDREN = {
    "connectors": [
        {"kv_connector": "torpor.testing.connectors:PinnedConnector", "kv_connector_extra_config": {"socket_dir": "{folder}"}},
        "torpor.testing.connectors:UnsupportedConnector",
    ]
}
SOCKETS = {"socket_dir": "{folder}"}

MUTANTS = (
    Mutant(SpeaksForItsChildren, "refusal", CHILDREN),
    Mutant(PrefixBlind, "placement", SOCKETS),
    Mutant(Greedy, "own buffers", SOCKETS),
    Mutant(Talkative, "blocks end", SOCKETS),
    Mutant(Miserly, "blocks end", SOCKETS),
    Mutant(Credulous, "wrong requests", SOCKETS),
    Mutant(ModelBlind, "other layout", SOCKETS),
    Mutant(OldBytes, "follow", SOCKETS),
    Mutant(Optimist, "in-flight read", SOCKETS),
    Mutant(Dreamer, "late read", SOCKETS),
    Mutant(SameEpoch, "old epoch", SOCKETS),
    Mutant(Mournful, "peer crash", SOCKETS),
    Mutant(Patient, "silent peer", SOCKETS),
    Mutant(OnceOnly, "double sleep", SOCKETS),
    Mutant(Sulking, "failed release", SOCKETS),
    Mutant(OneTry, "failed restore", SOCKETS),
    Mutant(EarlyBird, "partial wake", SOCKETS),
    Mutant(Clinging, "shutdown", SOCKETS),
    Mutant(KeepsMappings, "bytes flat", SOCKETS),
    Mutant(KeepsBytes, "bytes flat", SOCKETS),
    Mutant(KeepsDescriptors, "resources flat", SOCKETS),
    Mutant(KeepsThreads, "resources flat", SOCKETS),
)
