"""One region of a pool and the tensors in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from torpor._native import Region
from torpor.memory.image import Image
from torpor.memory.layout import FreeList, Mask, byte_runs, chunks_of
from torpor.memory.procfs import fork_count

if TYPE_CHECKING:
    from torpor.memory.pool import Pool

ALIGN_BYTES = 256


class Segment:
    """A region and where tensors lie in it."""

    def __init__(self, owner: Pool, region: Region, shared: bool, pinned_at_map: int, by_torch: bool = False) -> None:
        self.owner = owner
        self.region = region
        self.layout = FreeList(region.nbytes, ALIGN_BYTES)
        self.shared = shared  # takes any tensor that fits; else it was made for one
        self.by_torch = by_torch  # it is one segment of torch's allocator, which alone knows what lies in it
        self.image: Image | None = None
        self.stale = False  # the image is the content, whatever may be mapped
        self.fresh = False  # it was unmapped, and whatever is mapped since has not been noted
        self.exported = False  # since it was mapped last
        self.dying = False  # empty, and may be half destroyed: it is not used again
        self.note_mapped(pinned_at_map)
        self.address: int = region.address
        self.nbytes: int = region.nbytes

    def note_mapped(self, pinned_bytes: int) -> None:
        """Fresh memory: pins (``Shared.unexplained_pins``) and forks of before cannot hold it."""
        self.fresh = False
        self.pinned_at_map = pinned_bytes
        self.forks_at_map = fork_count()

    @property
    def may_be_held(self) -> bool:
        """Another process may have the memory files: they were exported, or inherited by a forked child."""
        return self.exported or self.forks_at_map != fork_count()

    @property
    def tag(self) -> str:
        return self.owner.tag

    @property
    def mapped(self) -> bool:
        return self.region.mapped

    @property
    def image_bytes(self) -> int:
        image = self.image
        return 0 if image is None else image.committed_bytes

    @property
    def shared_image_bytes(self) -> int:
        image = self.image
        return 0 if image is None else image.shared_bytes

    def live(self, chunk_bytes: int) -> Mask:
        """The chunks that tensors lie in: what an image has to hold."""
        return chunks_of(self.layout, chunk_bytes)

    def live_bytes(self, chunk_bytes: int) -> int:
        return sum(size for _, size in byte_runs(self.live(chunk_bytes), chunk_bytes, self.nbytes))

    def covers(self, address: int) -> bool:
        return self.address <= address < self.address + self.nbytes


class Deaths:
    """Tensors that died, told by their finalizers. Those run inside garbage collection, at any point of any thread, so all they
    do is append; the memory is taken back at the next call into the memory layer."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Segment, int]] = deque()
        self.after: Callable[[], None] | None = None  # set by close(): from then on there is no next call

    def tell(self, segment: Segment, offset: int) -> None:
        self._queue.append((segment, offset))
        if self.after is not None:
            self.after()

    def take(self) -> tuple[Segment, int] | None:
        try:
            return self._queue.popleft()
        except IndexError:
            return None

    def __bool__(self) -> bool:
        return bool(self._queue)
