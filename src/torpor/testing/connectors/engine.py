"""The stand-in engine as the suite drives it: its answers are plain data, so that it can also be asked from another process."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from torpor._native import Device, Op
from torpor.connectors import KVConnectorWorker
from torpor.connectors.multi_worker import MultiWorker
from torpor.connectors.store_worker import StoreWorker
from torpor.connectors.worker import PullWorker
from torpor.errors import RequestError, StateError, TorporError, TransportError
from torpor.kvcache.types import KVCacheSpec
from torpor.memory import MemoryConfig, SleepReport
from torpor.memory.procfs import pinned_bytes
from torpor.request import GenerationRequest, SamplingParams
from torpor.testing.connectors.memory import MemoryConnectorWorker
from torpor.testing.connectors.subject import Phase, Subject
from torpor.testing.connectors.vitals import vitals
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine, expected

WEIGHTS_BYTES = 1 << 20
ALIGNMENT = 256  # of tensors in a pool
READ_S = 25.0  # less than a call may take


class SuiteEngine(KVEngine):
    """A KV cache, a second pool ``weights``, and a device whose driver can be told to fail."""

    present: ClassVar[set[SuiteEngine]] = set()  # in this process

    def __init__(
        self, subject: Subject, role: Any, engine_id: str, folder: str, spec: KVCacheSpec | None = None, **settings: Any
    ) -> None:
        self._subject = subject
        memory = subject.memory or MemoryConfig(driver="host", extent_bytes=1 << 20)
        config = subject.with_settings(settings).config(role, engine_id, folder)
        self._device = Device.open(memory.driver, memory.device, faults=True)
        try:
            super().__init__(config, spec or SMALL_SPEC, kind=subject.kind, device=self._device, memory=memory)
        except BaseException:
            with contextlib.suppress(StateError):  # the error's frames keep tensors, and those the device
                self._device.close()
            raise
        self.present.add(self)
        self._blocks_asked = 0
        self.pools_at_start = self.pool_bytes()
        self._weights = self.memory.pool("weights", policy="host").empty((WEIGHTS_BYTES,), dtype=torch.uint8)
        self._weights.fill_(7)

    # ---- requests ----------------------------------------------------------------------------------------------------------

    def read(
        self, request_id: str, prompt: Sequence[int], params: dict[str, Any], block_ids: Sequence[int], num_computed: int = 0
    ) -> str:
        """``load``, or "nothing" when the connector knows of no KV for this prompt, or "refused" when it refuses the params."""
        tokens = self.ask(request_id, prompt, params, block_ids, num_computed)
        if tokens <= 0:
            return "nothing" if tokens == 0 else "refused"
        return self.wait(request_id, self._subject.patient(READ_S))

    def ask(
        self, request_id: str, prompt: Sequence[int], params: dict[str, Any], block_ids: Sequence[int], num_computed: int = 0
    ) -> int:
        """``begin_load``; -1 when the params are refused."""
        self._blocks_asked = 0
        try:
            tokens = self.begin_load(request_id, prompt, params, block_ids, num_computed)
        except RequestError:
            return -1
        self._blocks_asked = -(-tokens // self.spec.block_size)
        return tokens

    def blocks_asked(self) -> int:
        """How many blocks the last ``ask`` or ``read`` was for: where KV is found by tokens, whatever whole blocks there are."""
        return self._blocks_asked

    def tell(self, request_id: str, prompt: Sequence[int], params: dict[str, Any]) -> None:
        """A request whose KV is all here already: nothing is loaded, the owner may let go."""
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=1),
            kv_transfer_params=params or None,
        )
        self.scheduler.update_state_after_alloc(request, [], 0)
        self.step()

    def keeps(self) -> bool:
        return self.kept

    def reported(self, request_id: str, for_s: float) -> str | None:
        """What is reported of a request within that time; None: nothing."""
        try:
            return self.wait(request_id, for_s)
        except TimeoutError:
            return None

    def knows(self, prompt: Sequence[int]) -> bool:
        """Whether the connector would find KV for this prompt by its tokens alone."""
        request = GenerationRequest(request_id="asks", prompt_token_ids=list(prompt), sampling=SamplingParams(max_tokens=1))
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0] > 0

    def has_from(self, prompt: Sequence[int], block_ids: Sequence[int], first: int) -> bool:
        """Whether these blocks hold the prompt's KV from block ``first`` on."""
        return all(self.block(block) == expected(self.spec, prompt, first + i) for i, block in enumerate(block_ids))

    def sums(self) -> list[int]:
        """One checksum per block."""
        return [zlib.crc32(self.block(block)) for block in range(self.spec.num_blocks)]

    # ---- sleep and wake ----------------------------------------------------------------------------------------------------

    def doze(self, policies: dict[str, str] | None = None) -> dict[str, Any]:
        """Sleeps: by default the KV cache alone."""
        try:
            report = self.memory.sleep(policies or {"kv_cache": "discard"})
        finally:
            self.publish()
        holders = [holder.who for tag in report.tags for holder in tag.holders]
        held = report.held_bytes - self._pinned_by_others(report)
        return {"held": held, "unmapped": report.unmapped_bytes, "noop": report.noop, "holders": holders}

    def _pinned_by_others(self, report: SleepReport) -> int:
        """Pins count by process, so those of another engine here look like ours: up to what that one has registered."""
        pins = sum(h.bytes for tag in report.tags for h in tag.holders if h.who.startswith("pinned by this process"))
        theirs = sum(other.worker.stats().registered_bytes for other in self.present if other is not self)
        return pins if pinned_bytes() <= theirs else 0

    def rise(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Wakes: by default the KV cache alone."""
        tags = tags or ["kv_cache"]
        try:
            report = self.memory.wake(tags)
        finally:
            if "kv_cache" in tags and self.residency() == "resident":
                self.memory.mark_valid("kv_cache")
            self.publish()
        return {"noop": report.noop}

    def residency(self) -> str:
        return self.memory.stats().tag("kv_cache").residency.value

    def epoch_text(self) -> str | None:
        epoch = self.worker.epoch()
        return None if epoch is None else str(epoch)

    def published(self) -> bool:
        return self.worker.get_handshake_metadata() is not None

    def hooks(self) -> int:
        return sum(tag.hooks for tag in self.memory.stats().tags)

    def subscribed(self) -> bool:
        return self.memory.stats().tag("kv_cache").hooks > 0

    def grants(self) -> int:
        return len(self.memory.export_ledger.grants())

    def imports(self) -> int:
        return self._device.stats().live_imports

    def release(self) -> None:
        self.worker.release_kv_caches()
        self.publish()

    def restore(self) -> None:
        self.worker.restore_kv_caches()
        self.publish()

    # ---- making things fail ------------------------------------------------------------------------------------------------

    def break_driver(self, op: str, nth: int = 1, count: int = 1) -> None:
        self._device.arm_fault(Op[op], nth, count)

    def mend_driver(self) -> None:
        self._device.clear_faults()

    def break_hook(self, phase: Phase) -> None:
        """Somebody else's hook on the KV cache, which fails the next time it is called. It runs after the connector's own in a
        sleep, and before it in a wake."""
        again = self._unsubscribe

        def fail_once() -> None:
            unregister()
            raise RuntimeError("a hook of somebody else fails")

        again()
        if phase == "release":
            unregister = self.memory.register_tag_hooks("kv_cache", before_unmap=fail_once, name="grumpy")
        else:
            unregister = self.memory.register_tag_hooks("kv_cache", after_map=fail_once, name="grumpy")
        self._unsubscribe = self.memory.register_tag_hooks(
            "kv_cache", self.worker.release_kv_caches, self.worker.restore_kv_caches, "connector"
        )

    def fail_next(self, phase: Phase) -> bool:
        return (self._subject.fail_next or fail_next)(self.worker, phase)

    # ---- how it is ---------------------------------------------------------------------------------------------------------

    def vitals(self) -> dict[str, int]:
        """Of this process, and of its device."""
        stats = self._device.stats()
        of_device = {
            "device bytes": stats.mapped_bytes + stats.condemned_bytes,
            "imports": stats.live_imports,
            "bytes for images": stats.committed_bytes,
        }
        return vitals() | of_device

    def pool_bytes(self) -> dict[str, int]:
        """Bytes handed out to tensors, by tag."""
        return {tag.tag: tag.allocated_bytes for tag in self.memory.stats().tags}

    def taken_at_start(self) -> dict[str, int]:
        """``pool_bytes`` when the connector had registered, less the KV cache's own tensors."""
        own = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in self.kv_caches.values())
        return {tag: nbytes - (own if tag == "kv_cache" else 0) for tag, nbytes in self.pools_at_start.items()}

    def stats_text(self) -> dict[str, Any]:
        stats = self.worker.stats()
        return {"in flight": stats.loads_in_flight, "hand-offs": stats.pending_hand_offs, "registered": stats.registered_bytes}

    # ---- end ---------------------------------------------------------------------------------------------------------------

    def leave(self) -> list[str]:
        """Ends the connector as an engine does, and does not end the memory. What went wrong with it."""
        wrong = []
        self._unsubscribe()
        for _ in range(2):
            try:
                self.worker.shutdown()
            except BaseException as error:
                wrong.append(f"shutdown() raised {type(error).__name__}: {error}")
        return wrong

    def close(self) -> None:
        if self not in self.present:  # closed already, or never made
            super().close()
            return
        self.present.remove(self)
        self._device.clear_faults()
        del self._weights
        super().close()
        self._device.close()


def fail_next(worker: KVConnectorWorker, phase: Phase) -> bool:
    """For torpor's own workers."""
    if isinstance(worker, MemoryConnectorWorker):
        setattr(worker, f"fail_{phase}", 1)
        return True
    if isinstance(worker, MultiWorker):  # the child that is asked last: the others have done it
        return fail_next(worker._children[0 if phase == "release" else -1], phase)
    if isinstance(worker, StoreWorker) and phase == "release":  # nothing of its restore can fail
        _once(worker._mover, "wait_idle")
        return True
    if isinstance(worker, PullWorker):
        _once(worker._transport, "unpublish" if phase == "release" else "publish")
        return True
    return False


def _once(transport: Any, name: str) -> None:
    plain: Callable[..., Any] = getattr(transport, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        setattr(transport, name, plain)
        raise TransportError("told to fail", transport="any")

    setattr(transport, name, fail)


def told(error: BaseException) -> str:
    """What went wrong, with its cause, in one line."""
    cause = f" < {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
    kind = type(error).__name__ if isinstance(error, TorporError) else f"{type(error).__module__}.{type(error).__name__}"
    return f"{kind}: {error}{cause}"
