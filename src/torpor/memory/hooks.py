"""Hooks on tags: whoever registered a tag's pages lets go before the unmap and comes back after the map."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torpor.errors import HookError, TorporError

HookFunction = Callable[[], None]


@dataclass(eq=False)
class Hook:
    tag: str
    name: str
    order: int
    before_unmap: HookFunction | None
    after_map: HookFunction | None


@dataclass(frozen=True)
class HookFailure:
    hook: Hook
    error: Exception

    def __str__(self) -> str:
        return f"{self.hook.name}: {self.error!r}"


class Hooks:
    """Both functions of a hook must be idempotent: a retried sleep or wake calls them again (M3)."""

    def __init__(self) -> None:
        # Both change by single steps that no other thread, and no finalizer, can come between: there is no lock to wait for.
        self._hooks: dict[int, Hook] = {}  # by order, oldest first
        self._away: set[Hook] = set()  # let go, or failed to come back
        self._orders = itertools.count()
        self.seconds_of: dict[str, float] = {}  # by name, of the last ``release`` or ``restore``

    def register(self, tag: str, before: HookFunction | None, after: HookFunction | None, name: str) -> Callable[[], None]:
        """The returned function unregisters; calling it again does nothing."""
        hook = Hook(tag, name or _name_of(before or after), next(self._orders), before, after)
        self._hooks[hook.order] = hook

        def unregister() -> None:
            self._hooks.pop(hook.order, None)
            self._away.discard(hook)

        return unregister

    def clear(self) -> None:
        self._hooks.clear()
        self._away.clear()

    @property
    def _known(self) -> list[Hook]:
        return list(self._hooks.values())

    def count(self, tag: str) -> int:
        return sum(h.tag == tag for h in self._known)

    def away(self, tag: str) -> int:
        """How many hooks of ``tag`` let go and have not come back: a wake that covers the tag calls them."""
        return sum(h.tag == tag for h in self._known if h in self._away)

    def release(self, tags: Iterable[str]) -> list[Hook]:
        """before_unmap of every hook of ``tags``, newest first across tags; gives back those that ran, in that order (M2).

        When one raises, those that ran are undone, and it must be as before itself; it says that it is not by an error with the
        field ``undo_failures``. HookError then, fields: hook, tag, phase, undo_failures.
        """
        wanted, ran = set(tags), list[Hook]()
        self.seconds_of = {}
        for hook in [h for h in reversed(self._known) if h.tag in wanted]:
            try:
                self._timed(hook, hook.before_unmap)
            except BaseException as error:
                failures = self._own_failures(hook, error) + self.undo(ran)
                if not isinstance(error, Exception):
                    raise
                raise _error(HookFailure(hook, error), "before_unmap", "nothing was unmapped", undo_failures=failures) from error
            ran.append(hook)
            self._away.add(hook)
        return ran

    def undo(self, released: list[Hook]) -> tuple[str, ...]:
        """after_map of hooks that ``release`` gave back, the last to let go first. Failures are named; the next wake retries."""
        return tuple(str(f) for f in self._run_after(reversed(released)))

    def restore(self, tags: Iterable[str]) -> list[HookFailure]:
        """after_map of every hook of ``tags``, oldest first; one that fails does not stop the others (M3)."""
        wanted = set(tags)
        self.seconds_of = {}
        return self._run_after(h for h in self._known if h.tag in wanted)

    def _run_after(self, hooks: Iterable[Hook]) -> list[HookFailure]:
        failures = []
        for hook in list(hooks):
            try:
                self._timed(hook, hook.after_map)
                self._away.discard(hook)
            except Exception as error:
                self._away.add(hook)
                failures.append(HookFailure(hook, error))
        return failures

    def _timed(self, hook: Hook, function: HookFunction | None) -> None:
        if function is None:
            return
        began = time.perf_counter()
        try:
            function()
        finally:
            self.seconds_of[hook.name] = self.seconds_of.get(hook.name, 0.0) + time.perf_counter() - began

    def _own_failures(self, hook: Hook, error: BaseException) -> tuple[str, ...]:
        found = tuple(error.fields.get("undo_failures", ())) if isinstance(error, TorporError) else ()
        if found:
            self._away.add(hook)
        return tuple(f"{hook.name}: {text}" for text in found)


def restore_error(failures: list[HookFailure], report: object) -> HookError:
    """For a wake whose memory is mapped and whose hooks failed. Fields besides HookError's: report, failures (text)."""
    text = tuple(str(f) for f in failures)
    error = _error(failures[0], "after_map", "the memory is mapped; wake again to retry", report=report, failures=text)
    error.__cause__ = failures[0].error
    return error


def _error(failure: HookFailure, phase: str, outcome: str, **fields: object) -> HookError:
    hook = failure.hook
    message = f"hook {hook.name!r} of tag {hook.tag!r} failed in {phase}: {failure.error!r}; {outcome}"
    return HookError(message, hook=hook.name, tag=hook.tag, phase=phase, **fields)


def _name_of(function: HookFunction | None) -> str:
    return getattr(function, "__qualname__", repr(function))
