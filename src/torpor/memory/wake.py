"""The wake transaction: memory for everything asked, content from images, then hooks come back.

Where copies can go beside the creation of memory (cuda), and the device says beforehand that there is room for all, they do: what
gets content is created first, and hooks of tags that need none come back while the copies go on. Whatever fails then, those hooks
let go again and everything is unmapped (M5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torpor.errors import TorporError
from torpor.memory.clock import Phases
from torpor.memory.hooks import HookFailure, restore_error
from torpor.memory.pool import Pool
from torpor.memory.segment import Segment
from torpor.memory.shared import Shared
from torpor.memory.types import Content, Residency, TagWakeReport, WakeReport


@dataclass
class Rise:
    """What a wake does for one pool."""

    pool: Pool
    to_map: list[Segment]
    to_restore: list[Segment]
    noop: bool


def plan_rise(pool: Pool) -> Rise:
    residency, content = pool.state
    to_restore = [] if content is Content.LOST else [s for s in pool.segments if s.stale]
    noop = residency is Residency.RESIDENT and not to_restore
    return Rise(pool, pool.unmapped_segments(), to_restore, noop)


class Wake:
    """One call of ``Memory.wake``, under the transaction's lock."""

    def __init__(self, shared: Shared, pools: Sequence[Pool]) -> None:
        self._shared = shared
        self._rises = [plan_rise(p) for p in pools]
        self._phases = Phases()
        self._pinned = shared.unexplained_pins()  # before it maps: that may take the last descriptors, which looking needs
        self._early: list[Rise] = []  # whose hooks came back beside the copies
        self._early_failures: list[HookFailure] = []
        self._early_hooks_s: dict[str, float] = {}
        self.done = False  # memory is mapped and restored, whatever the hooks say

    @property
    def noop(self) -> bool:
        return all(r.noop for r in self._rises)

    def run(self) -> WakeReport:
        """HookError once everything is mapped and every hook was called; its field ``report`` is what would be returned."""
        if self._maps_beside():
            restored_first = set(self._to_restore)
            to_map = sorted(self._to_map, key=lambda s: s not in restored_first)
        else:
            with self._phases("create_map"):
                self._map()
            to_map = []
        restored = self._restore(to_map)
        late = [r for r in self._rises if r not in self._early]
        self._settle(late)
        self.done = True
        self._release_images()
        reports = tuple(_report(r, restored) for r in self._rises)
        with self._phases("hooks"):
            failures = self._early_failures + self._come_back(late)
        hooks_s = {**self._early_hooks_s, **self._shared.hooks.seconds_of}
        report = WakeReport(tags=reports, seconds=self._phases.seconds, phases_s=self._phases.seconds_of, hooks_s=hooks_s)
        if failures:
            raise restore_error(failures, report)
        return report

    @property
    def _to_map(self) -> list[Segment]:
        return [s for r in self._rises for s in r.to_map]

    @property
    def _to_restore(self) -> list[Segment]:
        return [s for r in self._rises for s in r.to_restore]

    def _maps_beside(self) -> bool:
        """Not where memory may be short: there all is created before any is mapped."""
        if not (self._shared.maps_beside and self._to_restore and self._to_map):
            return False
        return self._shared.device.free_bytes() >= sum(s.nbytes for s in self._to_map)

    def _map(self) -> None:
        """M5: the library creates all before it maps any; after a failure nothing has changed."""
        self._shared.device.map([s.region for s in self._to_map])

    def _restore(self, to_map: Sequence[Segment]) -> dict[Segment, int]:
        try:
            return self._shared.images.restore(self._to_restore, self._phases, to_map, self._come_back_early)
        except BaseException as error:
            self._unmap_again(error)
            raise

    def _come_back_early(self) -> None:
        """All is mapped, and copies go on: whoever registers pages of a tag that gets no content need not wait for them."""
        self._early = [r for r in self._rises if r.to_map and not r.to_restore]
        self._shared.copying = True
        try:
            with self._phases("hooks_beside_copies"):
                self._settle(self._early)
                self._early_failures = self._come_back(self._early)
                self._early_hooks_s = dict(self._shared.hooks.seconds_of)
        finally:
            self._shared.copying = False

    def _unmap_again(self, error: BaseException) -> None:
        """The images are whole. Where a hook or the driver refuses this too, the pools stay mapped, and what has content is stale
        until a wake restores it."""
        try:
            self._shared.hooks.release(r.pool.tag for r in self._early)
            self._shared.device.unmap([s.region for s in self._to_map])
        except TorporError as second:
            if isinstance(error, TorporError):
                error.fields["unmap_failure"] = str(second)
        for rise in self._early:
            rise.pool.slept = not rise.pool.mapped_segments()
            for segment in rise.to_map:
                segment.stale = segment.fresh = not segment.mapped
            rise.pool.lost |= any(s.stale for s in rise.to_map)  # a hook may have said that it is valid

    def _settle(self, rises: Sequence[Rise]) -> None:
        """What is mapped is the content now; until here every segment that was unmapped is stale."""
        for rise in rises:
            fresh = [s for s in rise.pool.segments if s.fresh]  # also of a wake that failed after it had mapped them
            for segment in rise.pool.segments:
                segment.stale = False
            for segment in fresh:
                segment.note_mapped(self._pinned)
            rise.pool.slept = False
            rise.pool.mapping += bool(fresh)
            rise.pool.settle_torch()

    def _release_images(self) -> None:
        """M6: only now, and only for pools made so."""
        for rise in self._rises:
            if rise.pool.settings.image == "release":
                for segment in rise.to_restore:
                    self._shared.images.release(segment)

    def _come_back(self, rises: Sequence[Rise]) -> list[HookFailure]:
        """M3: also for tags that were mapped all the time."""
        return self._shared.hooks.restore(r.pool.tag for r in rises if r.pool.residency is Residency.RESIDENT)


def _report(rise: Rise, restored: dict[Segment, int]) -> TagWakeReport:
    return TagWakeReport(
        tag=rise.pool.tag,
        mapped_bytes=sum(s.nbytes for s in rise.to_map),
        restored_bytes=sum(restored.get(s, 0) for s in rise.to_restore),
        content=rise.pool.content,
        noop=rise.noop,
    )
