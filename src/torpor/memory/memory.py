"""The front of the memory layer: pools by tag, and the calls that put them to sleep and wake them."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from torpor._native import Device
from torpor.errors import ConfigurationError, StateError, UnknownTagError
from torpor.memory.clock import Phases
from torpor.memory.config import MemoryConfig
from torpor.memory.drivers import choose_driver, open_device
from torpor.memory.exports import export_pool
from torpor.memory.hooks import HookFunction
from torpor.memory.image_files import why_impossible
from torpor.memory.integrity import check_integrity
from torpor.memory.ledger import ExportedPool, ExportLedger
from torpor.memory.loading import Loading, Staging
from torpor.memory.orphans import adopt_orphans
from torpor.memory.pool import Pool
from torpor.memory.settings import PoolSettings, checked_policy
from torpor.memory.shared import Shared
from torpor.memory.sharing import share_pool
from torpor.memory.sleep import Move, Sleep, plan_move
from torpor.memory.types import (
    AheadReport,
    Content,
    ImageUse,
    MemoryStats,
    Policy,
    Residency,
    SharingReport,
    SleepReport,
    WakeReport,
)
from torpor.memory.wake import Wake

if TYPE_CHECKING:
    import torch


class Memory:
    """Tagged pools on one device.

    Thread-safe. A sleep or wake holds everybody else's structural calls off until it is done; ``stats``, ``tag_of`` and the
    ledger never wait for it. Hooks run on the thread that sleeps or wakes; they may call those, ``exports``, and allocate, but
    not sleep or wake. While a tag sleeps, touching its tensors is a fault of the caller, as it is with freed memory.
    """

    def __init__(self, config: MemoryConfig | None = None, *, device: Device | None = None) -> None:
        """``device``: one that is open already; it stays the caller's. ConfigurationError when the driver is not available, and
        when images are to be shared where that cannot work."""
        asked = config or MemoryConfig()
        driver = device.driver if device else choose_driver(asked.driver, asked.device)
        self.config = dataclasses.replace(asked, driver=driver)
        if asked.share_images and (reason := why_impossible()):
            raise ConfigurationError(f"images cannot be shared here: {reason}", setting="share_images", value=True)
        self._owns_device = device is None
        self._shared = Shared(self.config, device or open_device(driver, self.config.device))
        self._pools: dict[str, Pool] = {}
        self._sleeps = self._wakes = 0
        self.export_ledger = ExportLedger(lambda tag: self._pool_named(tag).mapping)

    # ---- pools -------------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        return self._shared.device

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def pool(
        self,
        tag: str,
        policy: Policy | None = None,
        exportable: bool | None = None,
        guarded: bool | None = None,
        image: ImageUse | None = None,
    ) -> Pool:
        """The tag's pool, made at first use. What is not said takes the default then ("host", False, False, "retain").

        ``policy``: what a sleep that does not say otherwise does. ``exportable``: its memory can be given to other processes.
        ``guarded``: while asleep its addresses read zeros and swallow writes instead of faulting (P4). ``image``: whether host
        images outlive the wake that used them. ConfigurationError when the pool exists with other settings.
        """
        settings = PoolSettings(policy=policy, exportable=exportable, guarded=guarded, image=image)
        settings.check()
        _check_tag(tag)
        with self._shared.structure():
            existing = self._pools.get(tag)
            if existing is not None:
                settings.check_agrees(tag, existing.settings)
                return existing
            pool = Pool(tag, settings.or_defaults(), self._shared)
            self._pools = {**self._pools, tag: pool}
            return pool

    def tag_of(self, tensor: torch.Tensor) -> str | None:
        """Whose pool the tensor's storage lies in; None for memory of nobody's."""
        return next((p.tag for p in self._pools.values() if p.owns(tensor)), None)

    def register_tag_hooks(
        self, tag: str, before_unmap: HookFunction | None = None, after_map: HookFunction | None = None, name: str = ""
    ) -> Callable[[], None]:
        """Calls ``before_unmap`` before memory of the tag goes and ``after_map`` after it came back; gives back what unregisters.

        Both must be idempotent: a sleep or wake that is retried calls them again, and a wake calls ``after_map`` of every asked
        tag that is mapped, also when it was mapped all the time (M3). The tag need not have a pool yet.
        """
        _check_tag(tag)
        if before_unmap is None and after_map is None:
            raise ConfigurationError(f"a hook of tag {tag!r} needs before_unmap, after_map or both", setting="before_unmap")
        return self._shared.hooks.register(tag, before_unmap, after_map, name)

    def explain_pins(self, nbytes: int) -> None:
        """For a ``before_unmap`` hook that has seen the pins of its registration go: what this process still has pinned by now
        (``nbytes`` of VmPin) is no memory of a pool, but the transport's own buffers. Counts for one sleep: the one under way,
        or the next."""
        self._shared.explained_pins = max(self._shared.explained_pins, nbytes)

    def note_pins(self, tag: str, who: object, nbytes: int) -> None:
        """``who`` has seen its registration of the tag pin so many bytes (0: none any more). When another tag sleeps, they are
        not taken for what is missing of that one: pins are known by their sum only (VmPin)."""
        if nbytes:
            self._shared.known_pins[tag, who] = nbytes
        else:
            self._shared.known_pins.pop((tag, who), None)

    def mark_valid(self, tag: str) -> None:
        """The owner has filled a tag that was lost. StateError while it is not resident."""
        with self._shared.structure():
            pool = self._pool_named(tag)
            residency, content = pool.state
            if residency is not Residency.RESIDENT or content is Content.ON_HOST:
                raise StateError(f"tag {tag!r} is {residency.value}: wake([{tag!r}]) first", state=residency.value, tag=tag)
            pool.lost = False
            for segment in pool.segments:
                segment.stale = False

    def prepare_images(self, policies: Mapping[str, str] | None = None, *, fill: bool = False) -> int:
        """Takes the host memory that a sleep with these policies needs for images now, off its path; the bytes taken.

        As much as the tensors of the tags that go to the host. ``fill``: copies and checks their content too, so that the first
        sleep copies only what has changed since. A discard and ``release_images`` give the memory back. Errors are those of
        ``sleep``; HostMemoryError: nothing was taken.
        """
        with self._shared.structure():
            self._shared.require_no_copies("prepare_images")
            before = self._shared.backing.committed_bytes
            hosts = [move.pool for move in self._moves(policies) if move.policy == "host"]
            segments = [s for pool in hosts for s in pool.mapped_segments() if not s.stale]
            self._shared.backing.provide(segments)
            if fill:
                self._shared.images.save(segments, Phases())
            return self._shared.backing.committed_bytes - before

    def take_ahead(self, nbytes: int) -> None:
        """Begins to take host memory for images to come, so much in all, on native threads, and returns at once. Whoever makes
        the first images (``load_in_steps``, ``prepare_images``, a sleep) finds it, waits for the part it needs that is still to
        come, and takes itself what is not. ``end_ahead`` gives back what none of them needed; so does ``close``.

        Does nothing where there are images already. HostMemoryError, with nothing begun: there is not so much, or
        ``host_limit_bytes`` forbids it.
        """
        if nbytes <= 0:
            raise ConfigurationError(f"cannot take {nbytes} bytes: must be more than 0", setting="nbytes", value=nbytes)
        with self._shared.structure():
            self._shared.require_no_copies("take_ahead")
            self._shared.backing.take_ahead(nbytes)

    def end_ahead(self) -> AheadReport:
        """Nothing is taken ahead any more. Blocks for the parts that are under way. Idempotent."""
        with self._shared.structure():
            self._shared.require_no_copies("end_ahead")
            return self._shared.backing.end_ahead()

    def share_images(self, tag: str) -> SharingReport:
        """Makes the images of a resident tag now, in memory that every engine of this host with the same content uses: what
        another one has made is used, the rest is made for others to find. Blocks: it reads all of the content, and waits for an
        engine that is making the same.

        What cannot be shared is as it was, or has no image: the report says why, and a sleep makes a private one. Content that
        changes makes its image private again, by the sleep that finds it changed; to share it anew call this again. The memory
        goes with the last process that uses it. StateError unless the tag is resident and its content valid.
        """
        with self._shared.transaction("sharing of images"):
            pool = self._pool_named(tag)
            residency, content = pool.state
            if residency is not Residency.RESIDENT or content is not Content.VALID:
                message = f"tag {tag!r} is {residency.value}, its content {content.value}: fill or wake it first"
                raise StateError(message, state=residency.value, tag=tag)
            return share_pool(self._shared, pool)

    @contextlib.contextmanager
    def load_through_images(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Fills tensors by way of their host images: ``with memory.load_through_images(tensors) as staging: ...``.

        ``staging`` are CPU tensors of the same shapes and dtypes over the tensors' own bytes in the images (page-locked where the
        driver wants that), content undefined. Write all of them; when the block ends the bytes are copied to the device and
        checked there, and the images are up to date, so that the first sleep copies nothing. Do not keep ``staging``. When the
        block raises, the tensors are as they were.

        The tensors: contiguous, in resident pools of this memory, all read by nobody else meanwhile. Others may call ``stats``;
        structural calls of other threads wait. ConfigurationError, StateError, HostMemoryError: nothing has changed. DeviceError:
        the content is undefined; load again.
        """
        with self._loading(tensors) as loading:
            staging = loading.begin()
            loading.wait_for_all()
            yield staging.tensors
            loading.finish()

    @contextlib.contextmanager
    def load_in_steps(self, tensors: Sequence[torch.Tensor]) -> Iterator[Staging]:
        """``load_through_images`` in which taking host memory, writing and copying go on at once.

        ``with memory.load_in_steps(tensors) as staging``: write ``staging.tensors[i]`` after ``staging.ready(i)`` and then call
        ``staging.written(i)``, on any threads; memory comes in the order of addresses. What was not called written is when the
        block ends. When it raises, or ends in an error, the content of all the tensors is undefined: load again.
        """
        with self._loading(tensors) as loading:
            yield loading.begin()
            loading.finish()

    @contextlib.contextmanager
    def _loading(self, tensors: Sequence[torch.Tensor]) -> Iterator[Loading]:
        with (
            self._shared.transaction("load"),
            contextlib.closing(Loading(self._shared, self._pools.values(), tensors)) as loading,
        ):
            yield loading

    def release_images(self, tag: str) -> int:
        """Gives back the host memory of images that a resident tag retains; the bytes. StateError while they are the content."""
        with self._shared.structure():
            self._shared.require_no_copies("release_images")
            pool = self._pool_named(tag)
            if pool.content is Content.ON_HOST:
                raise StateError(f"the images of tag {tag!r} are its content: wake([{tag!r}]) first", state=pool.residency.value)
            before = self._shared.backing.committed_bytes
            for segment in pool.segments:
                self._shared.images.release(segment)
            return before - self._shared.backing.committed_bytes

    def exports(self, tag: str) -> ExportedPool:
        """Addresses, sizes and descriptors of the tag's present mapping. The descriptors are the caller's to close.

        ConfigurationError for a pool that was not made exportable. StateError while it is not resident, and at once while another
        thread sleeps or wakes.
        """
        with self._shared.structure_now():
            return export_pool(self._pool_named(tag))

    # ---- sleep and wake ----------------------------------------------------------------------------------------------------

    def sleep(self, policies: Mapping[str, str] | None = None) -> SleepReport:
        """Takes memory away: ``{tag: "keep" | "host" | "discard"}``. Tags not named are kept; None: every tag by its own policy.

        Checked before anything happens (M9): UnknownTagError, ConfigurationError (policy), StateError (lost content cannot go to
        the host). With everything still mapped and valid, hooks undone: HookError (M2), HostMemoryError, StateError (somebody
        writes meanwhile), DeviceError (M4). DeviceError with a field ``residency``: the unmap stopped half way (``holders``, by
        tag, hold what went), or what comes after it failed; nothing is lost, the same sleep goes on and a wake goes back.
        """
        with self._shared.transaction("sleep"):
            self._bury()
            report = Sleep(self._shared, self.export_ledger, self._moves(policies)).run()
            self._sleeps += not report.noop
            return report

    def _moves(self, policies: Mapping[str, str] | None) -> list[Move]:
        if policies is None:
            policies = {p.tag: str(p.settings.policy) for p in self._pools.values()}
        self._require_known(policies)
        checked = {tag: checked_policy(tag, policy) for tag, policy in policies.items()}
        return [plan_move(pool, checked[tag]) for tag, pool in self._pools.items() if tag in checked]

    def wake(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Maps memory at the same addresses and restores content from images; None: every tag.

        UnknownTagError. DeviceMemoryError, DeviceError: still asleep, images intact, the same wake can be retried (M5, M12).
        HookError: everything is mapped and restored, some after_map failed; field ``report``; the next wake retries (M3).
        """
        with self._shared.transaction("wake"):
            self._bury()
            wanted = self.tags if tags is None else tuple(tags)
            self._require_known(wanted)
            wake = Wake(self._shared, [p for p in self._pools.values() if p.tag in wanted])
            try:
                return wake.run()
            finally:
                self._wakes += wake.done and not wake.noop

    # ---- how it is ---------------------------------------------------------------------------------------------------------

    def stats(self) -> MemoryStats:
        """A snapshot. Never waits for a sleep or wake under way, changes nothing."""
        device = self._shared.device.stats()
        tags = tuple(p.stats() for p in self._pools.values())
        return MemoryStats(
            driver=self._shared.device.driver,
            device=self.config.device,
            tags=tags,
            mapped_bytes=device.mapped_bytes,
            condemned_bytes=device.condemned_bytes,
            host_committed_bytes=device.committed_bytes,
            host_shared_bytes=sum(t.shared_image_bytes for t in tags),
            host_spare_bytes=device.spare_bytes,
            host_limit_bytes=self.config.host_limit_bytes,
            sleeps=self._sleeps,
            wakes=self._wakes,
        )

    def check_integrity(self) -> None:
        """BugError when layouts, images, regions and the kernel's mappings disagree. Reads /proc; for tests and support."""
        with self._shared.structure():
            check_integrity(self._shared, list(self._pools.values()), self._owns_device)

    def close(self) -> None:
        """Frees everything, asleep or not. Idempotent. StateError inside a hook.

        Regions in which tensors still live stay as they are until the last of those dies (those made by torch: until torch frees
        them), and so does a device of our own.
        """
        with self._shared.lock:
            if self._shared.closed:
                return
            self._shared.require_still("close")
            self._shared.hooks.clear()
            with self._shared.torch_held():
                self._shared.take_back_dead()
                for pool in self._pools.values():
                    pool.close_torch()
                    for segment in [s for s in pool.segments if s.layout.empty]:
                        pool.destroy(segment)
            for segment in [s for p in self._pools.values() for s in p.segments]:
                segment.image = None
            self._shared.backing.close()
            self._shared.closed = True
            finish = self.device.close if self._owns_device else None
            adopt_orphans(self._shared.deaths, self._pools.values(), self.device.synchronize, finish)

    def __del__(self) -> None:
        shared = self.__dict__.get("_shared")
        if shared is not None and not shared.closed:
            warnings.warn(f"a Memory with tags {self.tags} was not closed", ResourceWarning, source=self, stacklevel=2)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _bury(self) -> None:
        for pool in self._pools.values():
            pool.bury()

    def _pool_named(self, tag: str) -> Pool:
        self._require_known([tag])
        return self._pools[tag]

    def _require_known(self, tags: Iterable[str]) -> None:
        for tag in tags:
            if tag not in self._pools:
                known = ", ".join(self._pools) or "none"
                raise UnknownTagError(f"tag {tag!r} is not known; known: {known}", tag=tag, known=self.tags)


def _check_tag(tag: str) -> None:
    if not isinstance(tag, str) or not tag:
        raise ConfigurationError(f"a tag is a word, not {tag!r}", setting="tag", value=tag)
