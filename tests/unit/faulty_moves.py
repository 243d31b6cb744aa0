"""Faults in sleeps, wakes and the end, and what grows with them."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any
from unittest import mock

from faulty_parts import FaultyPinned

from torpor.connectors import wire
from torpor.connectors.link import Link
from torpor.connectors.transport import Target
from torpor.connectors.worker import PullWorker
from torpor.errors import StateError
from torpor.kvcache.types import KVCacheSpec


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


class HabitualWorker(PullWorker):
    def set_weights_version(self, version: str) -> None:
        return


class Habitual(FaultyPinned):
    """Goes on under the version of the weights that it began with."""

    worker = HabitualWorker


class TrustingWorker(PullWorker):
    def register_kv_caches(self, kv_caches: Any, spec: KVCacheSpec, memory: Any) -> None:
        super().register_kv_caches(kv_caches, spec, memory)
        self.known: set[str] = set()
        self._look, self._live_reader._connect = self._live_reader._connect, self.connect  # type: ignore[method-assign]

    def connect(self, target: Target) -> Link:
        if target.engine_id not in self.known:
            link = self._look(target)
            self.known.add(target.engine_id)
            return link
        with mock.patch.object(wire, "check_compatible"):
            return self._look(target)

    def set_weights_version(self, version: str) -> None:
        super().set_weights_version(version)
        self.known.clear()


class Trusting(FaultyPinned):
    """Looks at the weights of a peer once, and again when its own have changed."""

    worker = TrustingWorker


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
        self.hoard.append(mmap.mmap(-1, 1 << 16))  # shared and of no descriptor


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
