"""An engine over pools on a failing device, a peer that reads its KV cache, and all that must hold of both at any time."""

from __future__ import annotations

import gc
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from kernel_view import Footprint, Range, areas_in, extent_bytes_alive, mapped_bytes, resident_elsewhere_bytes

from torpor._native import Device
from torpor.connectors import ConnectorConfig, get_connector
from torpor.connectors.worker import PullWorker
from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.engine.core import EngineCore
from torpor.engine.executor import UniprocExecutor
from torpor.engine.kv_connector import choose_connector
from torpor.engine.startup import bring_up
from torpor.engine.tickets import Ticket
from torpor.errors import AsleepError, CapacityError, DeviceError, HookError, SleepAborted, StateError, TorporError
from torpor.kvcache.types import KVCacheSpec
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.models.config import ModelConfig
from torpor.request import EngineOutput, FinishReason, GenerationRequest, SamplingParams
from torpor.testing.engine import FakeWorker, ManualBackground, fake_model
from torpor.testing.kv_engine import KVEngine

KIB = 1 << 10
CONFIG = MemoryConfig(extent_bytes=64 * KIB, chunk_bytes=16 * KIB, copy_threads=1)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # two blocks are handed off, the last token is the reader's to compute
HANDED = 2
ALL_TAGS = frozenset({"weights", "kv_cache", "runtime"})
FAILURES = (DeviceError, CapacityError, HookError, SleepAborted)
WAIT_S = 20.0
UCX_DESCRIPTORS = 16  # the progress thread of UCX closes those of a peer that left when it gets to it: two readers' worth


class FaultWorker(FakeWorker):
    """``FakeWorker`` with something to lose: two regions of weights, one of runtime state, each of several extents."""

    def __init__(self, device: Device, exportable: bool) -> None:
        super().__init__(Memory(CONFIG, device=device), num_blocks=1024, exportable=exportable)
        self.more: dict[str, torch.Tensor] = {}

    def load(self, progress: Callable[[str, float], None]) -> None:
        self.more["first"] = self.memory.pool("weights", policy="host").empty(100 * KIB, torch.uint8)
        self.more["second"] = self.memory.pool("weights").empty(130 * KIB, torch.uint8)
        super().load(progress)

    def initialize_kv_cache(self, num_blocks: int) -> KVCacheSpec:
        spec = super().initialize_kv_cache(num_blocks)
        self.more["buffers"] = self.memory.pool("runtime").empty(70 * KIB, torch.uint8)
        self.reset_runtime()
        return spec

    def _fill(self) -> None:
        super()._fill()
        for seed, name in enumerate(("first", "second")):
            _pattern(self.more[name], seed + 3)

    def reset_runtime(self) -> None:
        super().reset_runtime()
        _pattern(self.more["buffers"], 11)

    def tensors(self, tag: str) -> list[torch.Tensor]:
        lasting = {
            "weights": [self.weights, self.more.get("first"), self.more.get("second")],
            "runtime": [self.more.get("buffers")],
        }
        return [t for t in lasting[tag] if t is not None] if tag in lasting else list(self.kv_caches.values())

    def drop(self) -> None:
        self.more.clear()
        super().drop()


def _pattern(tensor: torch.Tensor, seed: int) -> None:
    tensor.copy_(torch.arange(tensor.numel()).mul_(seed).add_(tensor.numel() // 7).to(torch.uint8))


class Peer:
    """A decode engine on a sound device of its own. One for many engines, one after another."""

    def __init__(self, connector: str, folder: Path) -> None:
        self.connector = connector
        self.extra = {"socket_dir": str(folder / "kv")} if connector == "ipc" else {"staging_bytes": 64 * KIB}
        spec = KVCacheSpec(
            model_id="fake@1", num_layers=1, num_blocks=1024, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32"
        )
        self.kv = KVEngine(self.config("D", "consumer"), spec)
        self._numbers = itertools.count()

    def config(self, engine_id: str, role: Any) -> ConnectorConfig:
        return ConnectorConfig(
            connector=self.connector,
            engine_id=engine_id,
            role=role,
            extra=self.extra,
            lease_heartbeat_s=0.5,
            withdraw_timeout_s=5.0,
        )

    def read(self, params: dict[str, Any]) -> list[bytes] | None:
        """The blocks of a hand-off as they arrived; None when the read failed cleanly."""
        name = f"read-{next(self._numbers)}"
        blocks = list(range(HANDED + 1))
        if self.kv.load(name, PROMPT, params, blocks) == "failed":
            return None
        return [self.kv.block(b) for b in blocks[:HANDED]]


class Engine:
    """Driven by hand on one thread; a memory transaction runs within the step that begins it."""

    def __init__(self, device: Device, peer: Peer | None) -> None:
        self.device = device
        self.peer = peer
        self.worker = FaultWorker(device, exportable=peer is not None)
        self._first: Footprint | None = None
        self.outputs: dict[str, list[EngineOutput]] = {}
        self._numbers = itertools.count()
        self.core = self._bring_up()
        memory = self.worker.memory
        self.ranges: dict[str, list[Range]] = {tag: self._ranges(tag) for tag in memory.tags}
        self.pointers = self._pointers()
        self.digests = {tag: self.digest(tag) for tag in ("weights", "runtime")}
        self.text = self.answer()
        self._other_extents = extent_bytes_alive() - memory.stats().mapped_bytes

    def _bring_up(self) -> EngineCore:
        config = EngineConfig(model=ModelConfig(source="fake"), sleep=SleepConfig(enable_sleep_mode=True))
        chosen = None
        if self.peer is not None:
            connector = self.peer.config("P", "producer")
            chosen = choose_connector(connector, config.sleep, get_connector(connector.connector))
        return bring_up(config, fake_model(128), UniprocExecutor(self.worker), chosen, background=ManualBackground(inline=True))

    def _ranges(self, tag: str) -> list[Range]:
        return [(s.address, s.address + s.nbytes) for s in self.worker.memory.pool(tag).segments]

    def _pointers(self) -> list[int]:
        return [t.data_ptr() for tag in sorted(ALL_TAGS) for t in self.worker.tensors(tag)]

    # ---- what is asked of it -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self.core.state

    @property
    def connector(self) -> PullWorker | None:
        assert self.worker.connector is None or isinstance(self.worker.connector, PullWorker)
        return self.worker.connector

    def sleep(self, **fields: Any) -> None:
        self.complete(self.core.sleep(SleepRequest(**fields)))

    def wake(self, tags: Sequence[str] | None = None) -> None:
        self.complete(self.core.wake_up(tags))

    def release_kv(self) -> None:
        self.complete(self.core.release_kv_cache_memory())

    def complete(self, ticket: Ticket) -> None:
        self._step_until(ticket.done)
        ticket.result(0)

    def answer(self) -> list[int]:
        outputs = self._request(6, None)
        assert outputs[-1].finish_reason is FinishReason.LENGTH, outputs[-1]
        return [token for output in outputs for token in output.new_token_ids]

    def hand_off(self) -> dict[str, Any]:
        """``kv_transfer_params`` of a prefill whose blocks wait for a reader."""
        last = self._request(1, {"do_remote_decode": True, "do_remote_prefill": False})[-1]
        assert last.kv_transfer_params is not None, last
        self.step()
        return last.kv_transfer_params

    def blocks(self, params: dict[str, Any]) -> list[bytes]:
        cache = self.worker.kv_caches["layers.0"]
        ids = params["remote_block_ids"][:HANDED]
        return [b"".join(cache[half, b].contiguous().view(torch.uint8).numpy().tobytes() for half in (0, 1)) for b in ids]

    def _request(self, max_tokens: int, params: dict[str, Any] | None) -> list[EngineOutput]:
        name = f"r{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=max_tokens)
        self.core.add(GenerationRequest(request_id=name, prompt_token_ids=PROMPT, sampling=sampling, kv_transfer_params=params))
        self._step_until(lambda: any(o.finish_reason for o in self.outputs.get(name, ())))
        return self.outputs.pop(name)

    def step(self) -> None:
        for output in self.core.step():
            self.outputs.setdefault(output.request_id, []).append(output)

    def _step_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if done():
                return
            self.step()
            time.sleep(0.001 if self.core.wait_s() else 0)
        raise AssertionError(f"the engine does not come to rest: {self.state}, {self.core.stats().scheduler}")

    # ---- what must hold ------------------------------------------------------------------------------------------------------

    def digest(self, tag: str) -> str:
        parts = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in self.worker.tensors(tag)]
        return hashlib.sha256(b"|".join(parts)).hexdigest()

    def check(self, *, rss: bool = False) -> None:
        """At rest, whatever has failed: a state with a name, and everybody tells the same. ``rss``: smaps, too."""
        assert self.state in (EngineState.AWAKE, EngineState.ASLEEP), self.state
        self.worker.memory.check_integrity()
        self._check_kernel(rss)
        self._check_bytes()
        self._check_connector()
        stats = self.core.stats()
        served = all(t.residency is Residency.RESIDENT and t.content is Content.VALID for t in stats.memory.tags)
        if self.state is EngineState.AWAKE:
            assert served, stats.memory
            assert stats.missing_tags == ()
        else:
            self._check_turns_away()
        assert stats.steps_failed == 0

    def _check_kernel(self, rss: bool) -> None:
        """Memory that the driver did not take back is counted as condemned, and may still lie where it was."""
        memory = self.worker.memory
        stats, device = memory.stats(), self.device.stats()
        assert stats.condemned_bytes == device.condemned_bytes
        every = [r for ranges in self.ranges.values() for r in ranges]
        areas = areas_in(every, rss=rss)
        for tag in stats.tags:
            ranges = self.ranges[tag.tag]
            assert 0 <= mapped_bytes(areas, ranges) - tag.resident_bytes <= device.condemned_bytes, tag
            asleep = [r for s, r in zip(memory.pool(tag.tag).segments, ranges, strict=True) if not s.mapped]
            assert resident_elsewhere_bytes(areas, asleep) == 0, tag
        assert stats.mapped_bytes == device.mapped_bytes == sum(t.resident_bytes for t in stats.tags)
        assert 0 <= mapped_bytes(areas, every) - device.mapped_bytes <= device.condemned_bytes
        assert extent_bytes_alive() - self._other_extents == device.mapped_bytes + device.condemned_bytes
        assert self._pointers() == self.pointers

    def _check_bytes(self) -> None:
        """What says that it is valid is, byte for byte."""
        for tag, digest in self.digests.items():
            if self.worker.memory.pool(tag).content is Content.VALID:
                assert self.digest(tag) == digest, tag

    def _check_connector(self) -> None:
        if self.connector is None:
            return
        kv = self.worker.memory.stats().tag("kv_cache")
        epoch, metadata = self.connector.epoch(), self.connector.get_handshake_metadata()
        assert (metadata is None) == (epoch is None)
        assert metadata is None or metadata["epoch"] == str(epoch)
        assert (self.connector.stats().epoch is None) == (epoch is None)
        if kv.residency is not Residency.RESIDENT:
            assert epoch is None, "served to peers, but not mapped"
            assert self.connector.stats().registered_bytes == 0
        if self.state is EngineState.AWAKE:
            assert epoch is not None, "the engine is awake, and its peers can read nothing"

    def _check_turns_away(self) -> None:
        try:
            self._request(1, None)
        except AsleepError:
            return
        raise AssertionError("an engine that is not awake took a request")

    def check_serves(self, unread: dict[str, Any] | None, content: list[bytes]) -> None:
        """Awake: the same text, and a peer that reads gets the right bytes, or none of a hand-off that did not survive."""
        assert self.state is EngineState.AWAKE
        self.check()
        assert self.device.stats().condemned_bytes == 0
        if self.peer is None:
            assert self.answer() == self.text
            return
        if unread is not None:
            assert self.peer.read(unread) in (None, content)
        assert self.answer() == self.text
        params = self.hand_off()
        found = self.peer.read(params)
        assert found is not None, "a peer cannot read from an engine that is awake"
        assert found == self.blocks(params)
        self._step_until(lambda: not self.core.scheduler.has_transfers)

    # ---- from point to point -------------------------------------------------------------------------------------------------

    def refresh(self) -> tuple[dict[str, Any] | None, list[bytes]]:
        """Awake, without images, as after the start; with a hand-off that nobody has read and its bytes."""
        self.release_images()
        if self.peer is None:
            return None, []
        params = self.hand_off()
        return params, self.blocks(params)

    def release_images(self) -> None:
        for tag in ALL_TAGS:
            self.worker.memory.release_images(tag)

    def footprint(self) -> Footprint:
        assert self.device.stats().committed_bytes == self.worker.memory.stats().host_committed_bytes == 0
        self._first = self._first or Footprint.now()
        return Footprint.now()

    def check_footprint(self, before: Footprint) -> None:
        assert self.device.stats().committed_bytes == self.worker.memory.stats().host_committed_bytes == 0
        if self.peer is not None and self.peer.connector == "nixl":
            assert self._first is not None
            self._first.check_back(descriptors=UCX_DESCRIPTORS)
        else:
            before.check_back()

    def close(self) -> None:
        self.core.shutdown()
        gc.collect()


def failure_of(call: Callable[[], object]) -> TorporError | None:
    """What a call under a fault raised: one of the errors that may come, and none that says that somebody called it wrong."""
    try:
        call()
    except FAILURES as error:
        return error
    except StateError as error:
        raise AssertionError(f"a driver's failure was told as a wrong call: {error!r}") from error
    return None
