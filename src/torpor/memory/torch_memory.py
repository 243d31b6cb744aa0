"""What torch has allocated in one pool: its segments, and when torch may have more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torpor._native import Region, TorchMode, TorchSlot
from torpor.errors import BugError, StateError, TorporError
from torpor.memory.mempools import MemPools, TorchBackend
from torpor.memory.segment import Segment
from torpor.memory.torch_cuda import TorchCuda

if TYPE_CHECKING:
    from torpor.memory.pool import Pool
    from torpor.memory.shared import Shared


class TorchMemory:
    """Made at the first ``with pool:``. Modes are set under the memory's lock; ``look`` is called under its view."""

    def __init__(self, pool: Pool, shared: Shared, torch: TorchBackend | None = None) -> None:
        """HELD. ConfigurationError where torch cannot be made to allocate here, StateError when there are too many such pools."""
        settings = pool.settings
        backend = torch or TorchCuda(shared.config.device)
        self.pool = pool
        self.closed = False
        self._slot = TorchSlot(
            shared.device,
            shared.config.device,
            extent_bytes=shared.config.extent_bytes,
            exportable=bool(settings.exportable),
            guarded=bool(settings.guarded),
            name=pool.tag,
        )
        self._mode = TorchMode.HELD
        self._segments: dict[int, Segment] = {}
        self._backend = backend
        try:
            self.mempools = MemPools(pool.tag, backend, self._slot.functions)
        except BaseException:
            self._slot.disown()
            raise

    @property
    def functions(self) -> tuple[str, str]:
        return self._slot.functions

    # ---- when torch may allocate ---------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """The memory layer is at work: nothing that torch frees goes before it is done."""
        if self._mode is TorchMode.OPEN:
            self._set(TorchMode.HELD)

    def release(self) -> None:
        if self._mode is TorchMode.HELD:
            self._set(TorchMode.OPEN)

    def admit(self, allowed: bool) -> None:
        """From now on torch gets memory here, or nothing. Not to be called while torch is not held."""
        self._set(TorchMode.HELD if allowed else TorchMode.SHUT)

    def _set(self, mode: TorchMode) -> None:
        if mode is not self._mode:
            self._slot.set_mode(mode)
            self._mode = mode

    # ---- what there is -------------------------------------------------------------------------------------------------------

    def look(self) -> tuple[Segment, ...]:
        """Segments that torch was given since the last look; those that it freed are dying from here on."""
        if self.closed:
            return ()
        shared = self.pool._shared
        pinned = shared.unexplained_pins() if shared.on_host else 0  # first: what was taken and not kept would be lost
        news = self._slot.take()
        born = tuple(self._segment(region, pinned) for region in news.born)
        for address in news.dead:
            segment = self._segments.pop(address, None)
            if segment is None:
                raise BugError(f"torch freed {address:#x} in pool {self.pool.tag!r}, where nothing is")
            segment.layout.free(0)
            segment.dying = True
        return born

    def _segment(self, region: Region, pinned: int) -> Segment:
        segment = Segment(self.pool, region, shared=False, pinned_at_map=pinned, by_torch=True)
        segment.layout.allocate(region.nbytes)  # where in it torch's tensors lie is not known: all of it counts
        self._segments[segment.address] = segment
        return segment

    # ---- why torch got nothing -----------------------------------------------------------------------------------------------

    def refusals(self) -> int:
        return self._slot.refusals()[0]

    def reason_since(self, refusals: int, error: BaseException | None) -> TorporError | None:
        """Why torch ran out of memory, when it did so because it was given nothing here."""
        if self.closed:
            return None
        count, reason = self._slot.refusals()
        if count == refusals or reason is None or not self._backend.is_out_of_memory(error):
            return None
        if isinstance(reason, StateError):
            return StateError(reason.message, state=self.pool.residency.value, tag=self.pool.tag)
        return reason

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def leave_to_torch(self) -> None:
        """torch gives back what nobody uses, and gets nothing more."""
        self._set(TorchMode.SHUT)
        self.mempools.close()

    def disown(self) -> list[Segment]:
        """Under the view. What tensors still lie in is the native library's from here on, and goes when torch frees it: those
        segments are the result."""
        if self.closed:
            return []
        left = list(self._segments.values())
        self._slot.disown()
        self.closed = True
        for segment in left:
            segment.region.forget()
        return left
