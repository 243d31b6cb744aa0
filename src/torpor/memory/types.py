"""What the memory layer says of itself: residency, content, policies, and frozen reports."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["keep", "host", "discard"]
"""What a sleep does with a tag: leave it mapped, copy it to the host first, or drop its content."""

POLICIES: tuple[Policy, ...] = ("keep", "host", "discard")

ImageUse = Literal["retain", "release"]
"""What becomes of a pool's host images once a wake has restored it: kept, so that the next sleep copies only
changes, or given back."""

IMAGE_USES: tuple[ImageUse, ...] = ("retain", "release")


class Residency(enum.Enum):
    RESIDENT = "resident"  # every region of the tag is mapped
    ASLEEP = "asleep"  # no region of the tag is mapped; addresses are kept
    PARTIAL = "partial"  # some are: a driver call failed half way; sleep or wake again to leave it


class Content(enum.Enum):
    VALID = "valid"  # the mapped bytes are the content
    ON_HOST = "on_host"  # the content is in host images
    LOST = "lost"  # discarded, or mapped anew and not filled yet: mark_valid() after filling


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Somebody who keeps physical memory that was unmapped here."""

    who: str  # "peer d1 (pid 4711)", "pinned by this process"
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TagStats:
    tag: str
    residency: Residency
    content: Content
    regions: int
    reserved_bytes: int  # address space
    resident_bytes: int  # physical device memory mapped now
    allocated_bytes: int  # handed out to tensors
    image_bytes: int  # content held in host images
    exported: bool
    hooks: int
    shared_image_bytes: int = 0  # of image_bytes, in memory that engines of this host with the same content share
    hooks_away: int = 0  # of them, how many let go, or failed to come back: wake the tag, also if it is resident


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    driver: str
    device: int
    tags: tuple[TagStats, ...]
    mapped_bytes: int
    condemned_bytes: int
    host_committed_bytes: int
    host_limit_bytes: int | None
    sleeps: int
    wakes: int
    host_shared_bytes: int = 0  # of host_committed_bytes, in shared images; they count in full for each who uses them
    host_spare_bytes: int = 0  # taken ahead, and used by no image yet

    def tag(self, name: str) -> TagStats:
        return next(t for t in self.tags if t.tag == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingReport:
    """What ``Memory.share_images`` came to. What is not shared gets an image of its own by the next sleep or
    ``prepare_images``."""

    tag: str
    shared_bytes: int  # of the tag's images, after the call
    found_bytes: int  # of those, what another engine had made
    made_bytes: int  # and what was made now, for others to find
    private_bytes: int  # content that is in no shared image
    problems: tuple[str, ...]  # why, in words; also of tries that went well in the end

    def __str__(self) -> str:
        shared = f"{self.shared_bytes / 2**20:.0f} MiB shared, {self.found_bytes / 2**20:.0f} of them found on this host"
        if not self.private_bytes:
            return shared
        return f"{self.private_bytes / 2**20:.0f} MiB private ({'; '.join(self.problems)}), {shared}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadReport:
    """What ``Memory.take_ahead`` came to, by ``end_ahead``."""

    taken_bytes: int
    seconds: float  # from the call to the last byte
    unused_bytes: int  # of those, what no image needed, and was given back
    waited_s: float  # how long anybody waited for host memory of images meanwhile
    failure: str = ""  # why not all was taken; what was missing was taken when it was needed

    def __str__(self) -> str:
        taken = f"{self.taken_bytes / 2**30:.1f} GiB in {self.seconds:.1f} s beside the start, {self.waited_s:.1f} s waited for"
        return f"{taken}; {self.failure}" if self.failure else taken


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSleepReport:
    """M11. ``returned_bytes`` is what the device got back for certain; the rest of ``unmapped_bytes`` is with ``holders``."""

    tag: str
    policy: Policy
    unmapped_bytes: int
    returned_bytes: int
    image_bytes: int
    copied_bytes: int  # of image_bytes, what had changed and was copied now (M7)
    holders: tuple[Holder, ...] = ()
    noop: bool = False  # M9: it already was as asked


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepReport:
    tags: tuple[TagSleepReport, ...]
    seconds: float
    phases_s: dict[str, float] = field(default_factory=dict)  # hooks, commit, save (hash, copy, check), unmap, account
    hooks_s: dict[str, float] = field(default_factory=dict)  # of the phase "hooks", by the hook's name

    @property
    def unmapped_bytes(self) -> int:
        return sum(t.unmapped_bytes for t in self.tags)

    @property
    def returned_bytes(self) -> int:
        return sum(t.returned_bytes for t in self.tags)

    @property
    def held_bytes(self) -> int:
        return self.unmapped_bytes - self.returned_bytes

    @property
    def noop(self) -> bool:
        return all(t.noop for t in self.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagWakeReport:
    tag: str
    mapped_bytes: int
    restored_bytes: int  # copied from host images
    content: Content  # LOST when somebody has to fill it
    noop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeReport:
    tags: tuple[TagWakeReport, ...]
    seconds: float
    phases_s: dict[str, float] = field(default_factory=dict)  # create_map where it comes first, restore (copy, check), hooks
    hooks_s: dict[str, float] = field(default_factory=dict)  # of the phase "hooks", by the hook's name

    @property
    def noop(self) -> bool:
        return all(t.noop for t in self.tags)
